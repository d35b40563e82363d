// Data services: flows, their loaders and caches.
import * as api from "./api.js";
import { Chart } from "./chart.js";
import { bytes, card, count, h, nothing, percent, pill } from "./dom.js";
import { Table } from "./table.js";

export const title = "Data services";

export function mount(root) {
  const body = h("div", { class: "stack" }), parts = new Map();
  root.append(h("div", { class: "head" }, h("h1", {}, "Data services")), body);
  const empty = nothing("No data service on this machine.", h("span", {}, "A data service loads samples once for many jobs: ", h("code", {}, "ephemeron serve data"), "."));

  function part(s) {
    const state = h("span"), problem = h("p", { class: "bad" });
    const table = new Table([
      { name: "flow", label: "Flow", lead: true, value: (f) => f.flow, cell: (f) => [f.flow, h("span", { class: "soft" }, " v" + f.version)] },
      { name: "state", label: "State", value: (f) => f.state, cell: (f) => pill(f.state === "accessed" ? "running" : f.state) },
      ...[["samples", "Samples"], ["readers", "Readers"], ["shards", "Shards"], ["loaders", "Loaders"], ["loaded", "Loaded"], ["hits", "Found in cache"], ["skipped", "Skipped"]].map(([n, l]) => ({ name: n, label: l, kind: "n", value: (f) => f[n], cell: (f) => count(f[n]) })),
      { name: "rate", label: "Hit rate", kind: "n", value: (f) => f.hits / (f.hits + f.loaded), cell: (f) => percent(f.hits / (f.hits + f.loaded)) },
      { name: "cached_bytes", label: "Cached", kind: "n", value: (f) => f.cached_bytes, cell: (f) => bytes(f.cached_bytes) },
      { name: "buffered_bytes", label: "Loaded ahead", kind: "n", value: (f) => f.buffered_bytes, cell: (f) => bytes(f.buffered_bytes) },
    ], { key: (f) => f.flow, sort: "flow", caption: "Flows" });
    const chart = new Chart({ label: "Readers and loaders", empty: "Measured while this page is open.", xFormat: (v) => new Date(v * 1000).toTimeString().slice(0, 8), y: count, zero: true, whole: true });
    const none = h("p", { class: "nothing" }, "No flows are registered.");
    const node = card("Data service", { note: s.folder, tools: [state] }, problem, table.node, none, chart.node);
    return { node, chart, show(d) {
      state.replaceChildren(pill(d.running ? "running" : "stopped"));
      problem.textContent = d.problem; table.show(d.flows); table.node.hidden = !d.flows.length; none.hidden = d.flows.length > 0;
      chart.node.hidden = !d.history;
      if (d.history) chart.show([["readers", "c0"], ["loaders", "c2"]].map(([n, c]) => ({ label: n, x: d.history.t, y: d.history[n], colour: c })), { x: "time" });
    } };
  }

  const end = api.follow("services", "", (d) => {
    if (!d.services.length) { body.replaceChildren(empty); return; }
    empty.remove();
    for (const s of d.services) {
      if (!parts.has(s.folder)) { parts.set(s.folder, part(s)); body.append(parts.get(s.folder).node); }
      parts.get(s.folder).show(s);
    }
  });
  return () => { end(); parts.forEach((p) => p.chart.destroy()); };
}
