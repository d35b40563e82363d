// All studies.
import * as api from "./api.js";
import { count, h, nothing, number, pill, usd } from "./dom.js";
import { Table } from "./table.js";

export const title = "Studies";

export function mount(root) {
  const table = new Table([
    { name: "name", label: "Study", lead: true, value: (r) => r.name, cell: (r) => h("a", { href: "#/study/" + encodeURIComponent(r.key) }, r.name) },
    { name: "state", label: "State", value: (r) => r.state, cell: (r) => pill(r.state || "unknown") },
    { name: "metric", label: "Metric", value: (r) => r.metric, cell: (r) => (r.metric || "") + (r.mode ? " (" + r.mode + ")" : "") },
    { name: "sampler", label: "Search", value: (r) => r.sampler, cell: (r) => [r.sampler, r.pruner && r.pruner !== "none" ? r.pruner : ""].filter(Boolean).join(", ") },
    { name: "best", label: "Best", kind: "n", value: (r) => r.best_value, cell: (r) => number(r.best_value) },
    { name: "trials", label: "Trials", kind: "n", value: (r) => sum(r.counts), cell: (r) => count(ended(r.counts)) + " / " + count(r.trials_planned || sum(r.counts)) },
    { name: "spent", label: "Spent", kind: "n", value: (r) => r.spent_usd, cell: (r) => usd(r.spent_usd) },
    { name: "budget", label: "Budget", kind: "n", value: (r) => r.budget_usd, cell: (r) => usd(r.budget_usd) },
  ], { key: (r) => r.key, sort: "name", caption: "Studies", onrow: (r) => { location.hash = "#/study/" + encodeURIComponent(r.key); } });
  const empty = nothing("No studies yet.", h("span", {}, "A study searches the best parameters of a job or of a Python function: ", h("code", {}, "ephemeron tune study.toml"), "."));
  const list = h("div", { class: "card" }, table.node);
  list.hidden = true; empty.hidden = true;
  root.append(h("div", { class: "head" }, h("h1", {}, "Studies")), list, empty);
  return api.follow("studies", "", (d) => { table.show(d.studies); list.hidden = !d.studies.length; empty.hidden = d.studies.length > 0; });
}

const sum = (counts) => Object.values(counts || {}).reduce((a, b) => a + b, 0);
const ended = (counts) => ["finished", "pruned", "failed"].reduce((a, s) => a + ((counts || {})[s] || 0), 0);
