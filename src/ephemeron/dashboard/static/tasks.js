// Executors of tasks: depth of the queue and functions.
import * as api from "./api.js";
import { Chart } from "./chart.js";
import { card, count, h, nothing, pill, seconds, usd } from "./dom.js";
import { Table } from "./table.js";

export const title = "Tasks";

export function mount(root) {
  const body = h("div", { class: "stack" }), parts = new Map();
  root.append(h("div", { class: "head" }, h("h1", {}, "Tasks")), body);
  const empty = nothing("No tasks have run.", h("span", {}, "Functions over many items appear here: ", h("code", {}, "ephemeron map"), ", ", h("code", {}, "ephemeron linalg"), " or ", h("code", {}, "FunctionExecutor"), "."));

  function part(t) {
    const state = h("span"), tiles = h("dl", { class: "tiles" }), about = h("p", { class: "note" }), causes = h("div");
    const chart = new Chart({ label: "Depth of the queue", empty: "Measured while this page is open.", xFormat: (v) => new Date(v * 1000).toTimeString().slice(0, 8), y: count, zero: true, whole: true });
    const table = new Table([
      { name: "rank", label: "Function", kind: "n", value: (f) => f.rank, cell: (f) => f.rank },
      { name: "status", label: "Status", value: (f) => f.status, cell: (f) => pill(f.status === "ok" ? "finished" : f.status === "unknown" ? "no end recorded" : ["running", "cancelled"].includes(f.status) ? f.status : "failed") },
      { name: "outcome", label: "How", value: (f) => f.outcome, cell: (f) => f.outcome || f.error },
      { name: "start", label: "From", kind: "n", value: (f) => f.start, cell: (f) => seconds(f.start) },
      { name: "ran", label: "Ran for", kind: "n", value: (f) => f.end - f.start, cell: (f) => (f.status === "running" ? "–" : seconds(f.end - f.start)) },
      { name: "memory_mb", label: "Memory", kind: "n", value: (f) => f.memory_mb, cell: (f) => (f.memory_mb ? count(f.memory_mb) + " MB" : "–") },
    ], { key: (f) => f.invocation, sort: "rank", caption: "Functions of " + t.run, tall: true });
    const slowest = new Table([
      { name: "key", label: "Slowest items", value: (i) => i.key, cell: (i) => i.key },
      { name: "seconds", label: "Took", kind: "n", value: (i) => i.seconds, cell: (i) => seconds(i.seconds) },
      { name: "cost", label: "Cost", kind: "n", value: (i) => i.cost_usd, cell: (i) => usd(i.cost_usd) },
    ], { key: (i) => i.key, sort: "seconds", descending: true, caption: "Slowest items of " + t.run });
    const failed = new Table([
      { name: "key", label: "Failed items", value: (i) => i.key, cell: (i) => i.key },
      { name: "error", label: "Error", value: (i) => i.error, cell: (i) => i.error },
    ], { key: (i) => i.key, sort: "key", caption: "Failed items of " + t.run });
    const node = card(t.run, { note: t.name, tools: [state, h("a", { href: "#/run/" + encodeURIComponent(t.key) }, "Run")] }, h("div", { class: "stack" }, causes, tiles, about, chart.node, failed.node, slowest.node, table.node));
    return { node, chart, show(d) {
      state.replaceChildren(pill(d.status));
      causes.replaceChildren(d.causes.length ? h("div", { class: "causes", role: "alert" }, h("pre", {}, d.causes.join("\n"))) : "");
      const q = d.depth, r = d.result, one = (label, value, sub) => h("div", {}, h("dt", {}, label), h("dd", {}, value), h("dd", { class: "sub" }, sub || ""));
      const work = d.is_running || q
        ? [one("Waiting tasks", q ? count(q.ready) : "–", q && q.closed ? "no more will come" : ""), one("Leased tasks", q ? count(q.leased) : "–")]
        : [one("Tasks", count(r.tasks), r.tasks === null ? "only its client knew" : ""), one("Without a result", count(r.failed === null ? null : r.failed + r.cancelled), [r.failed && count(r.failed) + " failed", r.cancelled && count(r.cancelled) + " cancelled"].filter(Boolean).join(", "))];
      if (d.items) work.push(one("Items per second", count(d.items.items_per_s), count(d.items.items) + " in all, " + count(d.items.recorded) + " recorded before"),
        one("Cost per item", d.items.item_usd === null ? "–" : usd(d.items.item_usd), d.items.failures ? count(d.items.failures) + " failed" : "none failed"));
      tiles.replaceChildren(...work, one("Functions", count(d.is_running ? d.executors : d.invocations), d.is_running ? count(d.invocations) + " invocations" : d.failed ? count(d.failed) + " ended badly" : "all ended well"),
        one("Cost", usd(d.cost_usd), d.cost_usd === null ? "no prices" : d.budget_usd ? "of " + usd(d.budget_usd) : count(d.gb_seconds) + " GB-s"), one("Time", seconds(d.seconds)));
      about.textContent = d.is_running && !q ? "The queue is in " + (d.channel || "a channel elsewhere") + ", so its depth is not known here." : "";
      about.hidden = !about.textContent; chart.node.hidden = !d.history;
      if (d.history) { const [t0, ready, leased, executors] = d.history; chart.show([{ label: "waiting", x: t0, y: ready, colour: "c4" }, { label: "leased", x: t0, y: leased, colour: "c0" }, { label: "functions", x: t0, y: executors, colour: "c2" }], { x: "time" }); }
      table.show(d.functions);
      const items = d.items || { slowest: [], failed: [] };
      slowest.show(items.slowest); slowest.node.hidden = !items.slowest.length;
      failed.show(items.failed); failed.node.hidden = !items.failed.length;
    } };
  }

  const end = api.follow("tasks", "", (d) => {
    const there = new Set(d.tasks.map((t) => t.run));
    for (const [run, p] of parts) if (!there.has(run)) { p.node.remove(); p.chart.destroy(); parts.delete(run); }
    if (!d.tasks.length) { body.replaceChildren(empty); return; }
    empty.remove();
    for (const t of d.tasks) {
      if (!parts.has(t.run)) { parts.set(t.run, part(t)); body.append(parts.get(t.run).node); }
      parts.get(t.run).show(t);
    }
  });
  return () => { end(); parts.forEach((p) => p.chart.destroy()); };
}
