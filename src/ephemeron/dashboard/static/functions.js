// The invocations of a run, and the log of each.
import * as api from "./api.js";
import { drawer } from "./dialog.js";
import { count, h, number, pill, seconds } from "./dom.js";
import { Table } from "./table.js";

export class Functions {
  constructor(key) {
    this.key = key; this.live = false; this.rows = [];
    this.table = new Table([
      { name: "rank", label: "Rank", kind: "n", value: (r) => r.rank, cell: (r) => r.rank },
      { name: "attempt", label: "Attempt", kind: "n", value: (r) => r.attempt, cell: (r) => r.attempt },
      { name: "status", label: "Status", value: (r) => r.status, cell: (r) => pill(r.status === "ok" ? "finished" : r.status === "unknown" ? "no end recorded" : ["running", "cancelled"].includes(r.status) ? r.status : "failed") },
      { name: "how", label: "How", value: (r) => r.outcome || r.status, cell: (r) => (r.status === "ok" ? r.outcome : r.status.replace(/_/g, " ")) },
      { name: "reason", label: "Called as", value: (r) => r.reason, cell: (r) => r.reason },
      { name: "cold", label: "Start", value: (r) => String(r.cold), cell: (r) => (r.cold === null ? "–" : r.cold ? "cold" : "warm") },
      { name: "start", label: "From", kind: "n", value: (r) => r.start, cell: (r) => seconds(r.start) },
      { name: "end", label: "Ran for", kind: "n", value: (r) => r.end - r.start, cell: (r) => seconds(r.end - r.start) },
      { name: "gb_seconds", label: "Billed GB-s", kind: "n", value: (r) => r.gb_seconds, cell: (r) => number(r.gb_seconds, 4) },
      { name: "peak", label: "Peak memory", kind: "n", value: (r) => r.peak_memory_mb, cell: (r) => (r.peak_memory_mb ? count(r.peak_memory_mb) + " / " : "– / ") + count(r.memory_mb) + " MB" },
      { name: "log", label: h("span", { class: "unseen" }, "Log"), sort: false, cell: (r) => h("button", { type: "button", class: "small", "aria-label": "Log of rank " + r.rank + ", attempt " + r.attempt, onclick: () => this.open(r) }, "Log") },
    ], { key: (r) => r.rank + "/" + r.attempt + "/" + r.invocation, sort: "rank", caption: "Functions", tall: true, onrow: (r) => this.open(r) });
    this.node = this.table.node;
  }

  show(rows) { this.rows = rows; this.table.show(rows); }

  open(r) {
    const text = h("pre", { tabindex: "0", role: "log", "aria-label": "Output" }), said = h("p", { class: "soft" });
    const body = h("div", { style: { display: "contents" } }, h("p", { class: "soft mono" }, r.invocation), r.error ? h("div", { class: "causes" }, h("pre", {}, r.error)) : null, said, text);
    let offset = null, timer = null, over = false;
    const read = async () => {
      try {
        const got = await api.get("run/output", { key: this.key, invocation: r.invocation, ...(offset === null ? {} : { offset: offset }) });
        if (over) return;
        const below = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
        if (got.text) text.append(document.createTextNode(got.text));
        if (offset === null) said.textContent = !got.there ? "Its output is not on this machine, or it has printed nothing." : !got.size ? "It has printed nothing." : got.cut ? "The end of its output:" : "";
        offset = got.there ? got.offset : null;
        if (below) text.scrollTop = text.scrollHeight;
      } catch (e) { said.textContent = e.message; }
      if (!over && this.live) timer = setTimeout(read, 1500);
    };
    drawer("Log of rank " + r.rank + ", attempt " + r.attempt, body, () => { over = true; clearTimeout(timer); });
    read();
  }

  destroy() { document.querySelectorAll("dialog").forEach((d) => d.close()); }
}
