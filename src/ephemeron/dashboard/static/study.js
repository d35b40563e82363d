// One study: trials, their curves, and how parameters and value belong together.
import * as api from "./api.js";
import { Chart } from "./chart.js";
import { ask } from "./dialog.js";
import { card, count, h, nothing, number, pill, seconds, usd, words } from "./dom.js";
import { parallel } from "./parallel.js";
import { Table } from "./table.js";

export const title = "Study";
const MOST = 60;

export function mount(root, key) {
  let study = null, curves = [], table = null, names = "";
  const heading = h("h1"), state = h("span"), under = h("div", { class: "under" }), tiles = h("dl", { class: "tiles" }), notes = h("div"), place = h("div"), picture = h("div", { class: "parallel" });
  const chart = new Chart({ label: "Trials over iterations", empty: "No trial has been evaluated yet." });
  root.append(h("div", { class: "head" }, heading, state, under), h("div", { class: "stack" }, tiles, notes, h("div", { class: "columns wide" }, card("Curves", { note: "each trial's evaluations; the best one is the thickest" }, chart.node), card("Parameters and value", { note: "one line for each trial; the stronger, the better" }, picture)), card("Trials", {}, place)));

  const load = api.throttled(async () => { curves = (await api.get("study/curves", { key: key })).curves; draw(); }, 2500);

  function update(d) {
    study = d;
    window.document.title = d.name + " · ephemeron";
    heading.textContent = d.name;
    state.replaceChildren(pill(d.state || "unknown"));
    under.replaceChildren(...[d.job && (d.is_of_objective ? "objective " : "job ") + d.job, d.metric && "metric " + d.metric + " (" + d.mode + ")", d.sampler, d.pruner && d.pruner !== "none" ? d.pruner : ""].filter(Boolean).map((t) => h("span", {}, t)), h("code", {}, d.path));
    const c = d.counts, over = (c.finished || 0) + (c.pruned || 0) + (c.failed || 0);
    tiles.replaceChildren(
      tile("Best " + (d.metric || "value"), number(d.best_value), d.best !== null && d.best !== undefined ? "trial " + d.best : "none yet"),
      tile("Trials", count(over), [c.finished && c.finished + " finished", c.pruned && c.pruned + " pruned", c.failed && c.failed + " failed"].filter(Boolean).join(", ") || "none ended", d.trials_planned ? "/ " + count(d.trials_planned) : ""),
      tile("Running", count(c.running || 0), c.waiting ? c.waiting + " waiting" : "", d.concurrency ? "of " + d.concurrency + " functions" : ""),
      tile("Spent", usd(d.spent_usd), d.budget_usd ? "budget " + usd(d.budget_usd) : "no budget", "", d.budget_usd ? d.spent_usd / d.budget_usd : null),
      ...(d.is_of_objective ? [] : [tile("Predicted", usd(d.predicted_usd), d.predicted_s ? seconds(d.predicted_s) : "all trials, none pruned")]),
      tile("Time", seconds(d.seconds), d.deadline_s ? "deadline " + seconds(d.deadline_s) : ""));
    const remarks = [...(d.notes || []), ...(d.reason ? [d.reason] : [])];
    notes.replaceChildren(...(remarks.length ? [card("Notes", {}, h("ul", {}, remarks.map((n) => h("li", {}, n))))] : []));
    const parameters = [...new Set(d.trials.flatMap((t) => Object.keys(t.parameters)))];
    if (!table || names !== parameters.join()) { names = parameters.join(); table = make(parameters); place.replaceChildren(table.node); }
    table.show(d.trials);
    parallel(picture, d, parameters);
    load();
  }

  function tile(label, value, sub, small, share) {
    return h("div", {}, h("dt", {}, label), h("dd", {}, value, small ? h("small", {}, " " + small) : null), share !== null && share !== undefined ? h("div", { class: share > 1 ? "gauge over" : "gauge" }, h("i", { style: { width: Math.min(100, 100 * share) + "%" } })) : null, h("dd", { class: "sub" }, sub));
  }

  function make(parameters) {
    return new Table([
      { name: "number", label: "Trial", kind: "n", value: (t) => t.number, cell: (t) => (t.key ? h("a", { href: "#/run/" + encodeURIComponent(t.key) }, t.number) : t.number) },
      { name: "state", label: "State", value: (t) => t.state, cell: (t) => pill(t.ending ? "ending" : t.state || "unknown") },
      { name: "value", label: study.metric || "Value", kind: "n", value: (t) => t.value, cell: (t) => number(t.value) },
      ...parameters.map((p) => ({ name: "p:" + p, label: words(p.split(".").pop()), kind: study.trials.every((t) => typeof (t.parameters[p] ?? 0) === "number") ? "n" : "", value: (t) => t.parameters[p], cell: (t) => said(t.parameters[p]) })),
      { name: "evaluations", label: "Evaluations", kind: "n", value: (t) => t.evaluations, cell: (t) => count(t.evaluations) },
      { name: "seconds", label: "Time", kind: "n", value: (t) => t.seconds, cell: (t) => seconds(t.seconds) },
      { name: "cost_usd", label: "Cost", kind: "n", value: (t) => t.cost_usd, cell: (t) => usd(t.cost_usd) },
      { name: "predicted", label: "Predicted", kind: "n", value: (t) => t.predicted_usd, cell: (t) => usd(t.predicted_usd) },
      { name: "reason", label: "Remark", value: (t) => t.reason, cell: (t) => (t.traceback ? h("span", { title: t.traceback }, t.reason) : t.reason) },
      { name: "end", label: h("span", { class: "unseen" }, "End"), sort: false, cell: (t) => (t.state === "running" && !t.ending && (t.key || study.is_of_objective) ? h("button", { type: "button", class: "small danger", "aria-label": "End trial " + t.number, onclick: () => confirm(t) }, "End…") : "") },
    ], { key: (t) => t.number, sort: "number", caption: "Trials", tall: true, rowclass: (t) => (t.number === study.best ? "chosen" : "") });
  }

  function confirm(t) {
    ask("End trial " + t.number + "?", "Its functions end, and its place is given to the next trial. What it has reached so far counts.", [["End trial", "danger sure", async () => (await api.post("study/end", { key: key, trial: t.number })).text]]);
  }

  function draw() {
    const shown = curves.filter((c) => c.iteration.length), best = study.best, few = shown.length <= 8;
    const ordered = [...shown].sort((a, b) => (a.trial === best) - (b.trial === best)).slice(-MOST);
    chart.options.sync = null;
    chart.show(ordered.map((c, i) => ({ label: "trial " + c.trial, x: c.iteration, y: c.value, colour: c.trial === best ? "c1" : few ? "c" + [0, 2, 3, 4, 5, 6, 7][i % 7] : "c0", faint: !few && c.trial !== best, width: c.trial === best ? 2.4 : 1.4, points: c.iteration.length < 3 })), { x: "iteration" });
  }

  const end = api.follow("study", key, update, () => root.replaceChildren(nothing("There is no such study (any more).", h("a", { href: "#/studies" }, "All studies"))));
  return () => { end(); load.stop(); chart.destroy(); };
}

function said(v) { return v === undefined || v === null ? "–" : typeof v === "number" ? number(v, 5) : typeof v === "object" ? JSON.stringify(v) : String(v); }
