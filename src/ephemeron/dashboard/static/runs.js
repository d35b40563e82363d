// All runs: filter, sort, and the curves of those that are chosen.
import * as api from "./api.js";
import { Chart } from "./chart.js";
import { card, choice, count, h, labels, nothing, number, pill, seconds, usd, when } from "./dom.js";
import { Table } from "./table.js";

export const title = "Runs";
const COLOURS = 8;
const chosen = new Map();  // key -> place of its colour; kept while one looks at a run
const kept = { text: "", status: "", x: "iteration", quantity: "loss" };

export function mount(root) {
  let rows = [], curves = new Map();
  const search = h("input", { type: "search", placeholder: "Filter by name, kind, job, platform, label…", "aria-label": "Filter runs", value: kept.text, oninput: () => { kept.text = search.value; show(); } });
  const status = h("select", { "aria-label": "Status", onchange: () => { kept.status = status.value; show(); } }, [["", "All states"], ["running", "Running"], ["finished", "Finished"], ["stopped", "Stopped"], ["failed", "Failed"], ["interrupted", "Interrupted"]].map(([v, n]) => h("option", { value: v, selected: v === kept.status }, n)));
  const said = h("span", { class: "soft", role: "status" });
  const table = new Table([
    { name: "chosen", label: h("span", { class: "unseen" }, "compare"), kind: "tick", sort: false, cell: (r) => h("input", { type: "checkbox", "aria-label": "Compare " + r.run_id, checked: chosen.has(r.key), onchange: (e) => pick(r.key, e.target.checked) }) },
    { name: "run_id", label: "Run", lead: true, value: (r) => r.run_id, cell: (r) => h("a", { href: "#/run/" + encodeURIComponent(r.key) }, r.run_id, r.trial >= 0 ? h("span", { class: "soft" }, " · trial " + r.trial) : null, labels(r).map((text) => h("span", { class: "soft" }, " " + text))) },
    { name: "status", label: "Status", value: (r) => r.status, cell: (r) => pill(r.status) },
    { name: "platform", label: "Platform", value: (r) => r.platform, cell: (r) => r.platform },
    { name: "kind", label: "Kind", value: (r) => r.kind + " " + r.sync, cell: (r) => [r.kind, r.sync ? h("span", { class: "soft" }, " " + r.sync) : null] },
    { name: "workers", label: "Functions", kind: "n", value: (r) => r.workers, cell: (r) => count(r.workers) },
    { name: "iterations", label: "Done", kind: "n", value: (r) => r.iterations, cell: (r) => [count(r.iterations) + (r.planned && r.planned !== r.iterations ? " / " + count(r.planned) : ""), r.kind === "tasks" ? h("span", { class: "soft" }, " tasks") : ""] },
    { name: "loss", label: "Loss", kind: "n", value: (r) => r.loss, cell: (r) => number(r.loss) },
    { name: "metric", label: "Metric", kind: "n", value: (r) => first(r)[1], cell: (r) => { const [name, v] = first(r); return name ? [h("span", { class: "soft" }, name + " "), number(v)] : "–"; } },
    { name: "seconds", label: "Time", kind: "n", value: (r) => r.seconds, cell: (r) => seconds(r.seconds) },
    { name: "cost_usd", label: "Cost", kind: "n", value: (r) => r.cost_usd, cell: (r) => usd(r.cost_usd) },
    { name: "wall_time", label: "Started", kind: "n", value: (r) => r.wall_time, cell: (r) => when(r.wall_time) },
  ], { key: (r) => r.key, sort: "wall_time", descending: true, caption: "Runs", onrow: (r) => { location.hash = "#/run/" + encodeURIComponent(r.key); }, rowclass: (r) => (chosen.has(r.key) ? "chosen" : "") });
  const empty = nothing("No runs yet.", h("span", {}, "Start one with ", h("code", {}, "ephemeron train job.toml"), ", or give the folder of your runs: ", h("code", {}, "ephemeron serve dashboard FOLDER"), "."));
  const chart = new Chart({ label: "Curves of the chosen runs", xFormat: (v, x) => (x === "time" ? seconds(v) : number(v, 6)) });
  const quantity = h("select", { "aria-label": "Quantity", onchange: () => { kept.quantity = quantity.value; draw(); } });
  const compare = card("Compare", { tools: [quantity, choice("Horizontal axis", [["iteration", "Iterations"], ["time", "Time"]], kept.x, (x) => { kept.x = x; draw(); }), h("button", { type: "button", class: "small", onclick: () => { chosen.clear(); refresh(); } }, "Clear")] }, chart.node);
  compare.hidden = true;
  const reading = h("p", { class: "note", role: "status" }, "Reading the curves…");
  compare.insertBefore(reading, chart.node);
  const list = h("div", { class: "card" }, table.node);
  root.append(h("div", { class: "head" }, h("h1", {}, "Runs"), said), h("div", { class: "tools" }, search, status, h("span", { class: "grow" }), h("span", { class: "note" }, "Tick runs to compare their curves")), h("div", { class: "stack" }, compare, list, empty));

  async function pick(key, is) {
    if (!is) chosen.delete(key);
    else { const used = new Set(chosen.values()); let place = 0; while (used.has(place)) place++; chosen.set(key, place); }
    for (const known of table.nodes.values()) known.signature = "";
    show(); draw();
    if (!is || curves.has(key)) return;
    reading.hidden = false;  // at once: `load` waits between its readings
    const found = await api.get("run/series", { key: key, points: 800 }).catch(() => null);
    if (found && chosen.has(key)) curves.set(key, found);
    draw();
    if (found && found.share_read < 1) load();
  }

  function refresh() { for (const known of table.nodes.values()) known.signature = ""; show(); load(); }

  function show() {
    const text = kept.text.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const shown = rows.filter((r) => (!kept.status || r.status.startsWith(kept.status) || (kept.status === "running" && r.status.startsWith("on "))) && text.every((t) => [r.run_id, r.job, r.kind, r.platform, r.status, r.sync, r.study, ...labels(r)].join(" ").toLowerCase().includes(t)));
    table.show(shown);
    said.textContent = rows.length ? (shown.length === rows.length ? count(rows.length) : count(shown.length) + " of " + count(rows.length)) : "";
    empty.hidden = rows.length > 0; list.hidden = !rows.length;
  }

  const load = api.throttled(async () => {
    const keys = [...chosen.keys()].filter((key) => rows.some((r) => r.key === key));
    const found = await Promise.all(keys.map((key) => api.get("run/series", { key: key, points: 800 }).catch(() => null)));
    curves = new Map(keys.map((key, i) => [key, found[i]]).filter(([, s]) => s));
    draw();
    if (found.some((q) => q && q.share_read < 1)) load();
  }, 1500);

  function draw() {
    const on = [...curves].filter(([key]) => chosen.has(key));
    compare.hidden = !chosen.size;
    reading.hidden = on.length === chosen.size; chart.node.hidden = !on.length;
    if (!on.length) return;
    const options = ["loss", ...new Set(on.flatMap(([, q]) => [...Object.keys(q.metrics).map((m) => "batch " + m), ...Object.keys(q.evaluations.metrics).map((m) => "test " + m)])), "cost"];
    if (!options.includes(kept.quantity)) kept.quantity = "loss";
    quantity.replaceChildren(...options.map((o) => h("option", { value: o, selected: o === kept.quantity }, o)));
    const label = (key) => (rows.find((r) => r.key === key) || { run_id: key }).run_id;
    chart.options.y = kept.quantity === "cost" ? usd : number;
    const series = on.map(([key, q]) => {
      const c = curve(q, kept.quantity);
      return { label: label(key), x: kept.x === "time" || kept.quantity === "cost" ? c.t : c.iteration, y: c.value, colour: "c" + chosen.get(key) % COLOURS, dash: chosen.get(key) >= COLOURS ? [6, 4] : undefined, points: c.value.length < 40 };
    });
    chart.show(series, { x: kept.x === "time" || kept.quantity === "cost" ? "time" : "iteration" });
  }

  const end = api.follow("runs", "", (document) => { rows = document.runs; show(); if (chosen.size) load(); });
  show();
  return () => { end(); load.stop(); chart.destroy(); };
}

function curve(q, quantity) {
  if (quantity === "cost") return { t: q.cost.t, value: q.cost.usd };
  if (quantity.startsWith("test ")) { const e = q.evaluations; return { iteration: e.iteration, t: e.t, value: e.metrics[quantity.slice(5)] || e.t.map(() => null) }; }
  const c = quantity.startsWith("batch ") ? q.metrics[quantity.slice(6)] : q.loss;
  return c ? { iteration: c.iteration, t: c.t, value: c.smooth || c.value } : { iteration: [], t: [], value: [] };
}

function first(r) { return Object.entries(r.metrics || {})[0] || ["", null]; }
