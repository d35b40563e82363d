// Groups of functions of all runs, by the place where they run.
import * as api from "./api.js";
import { card, count, h, nothing, number, pill, usd } from "./dom.js";

export const title = "Regions";

export function mount(root) {
  const body = h("div", { class: "stack" });
  let known = "";
  root.append(h("div", { class: "head" }, h("h1", {}, "Regions")), body);
  const load = api.throttled(async () => {
    const grouped = (await api.get("runs")).runs.filter((r) => r.groups > 0);
    const found = await Promise.all(grouped.slice(0, 12).map((r) => api.get("run", { key: r.key }).catch(() => null)));
    const runs = found.filter((r) => r && r.groups.length), signature = JSON.stringify(runs);
    if (signature === known) return;
    known = signature;
    body.replaceChildren(...(runs.length ? runs.map(one) : [nothing("No run has several groups of functions.", h("span", {}, "A run whose functions are in several places has a group for each: see ", h("code", {}, "[[run.groups]]"), " in a job file. Its groups appear here with what each does and costs."))]));
  }, 2000);
  const end = api.follow("runs", "", load);
  return () => { end(); load.stop(); };
}

function one(run) {
  const total = run.groups.reduce((sum, g) => sum + (g.cost_usd || 0), 0);
  return card(run.run_id, { tools: [pill(run.status), h("a", { href: "#/run/" + encodeURIComponent(run.key) }, "Run")] }, h("div", { class: "scroll" }, h("table", {}, h("caption", { class: "unseen" }, "Groups of " + run.run_id),
    h("thead", {}, h("tr", {}, ["Group", "Platform", "Prices", "Ranks", "Functions", "Memory", "Samples", "Iterations", "GB-s", "Cost", "Share"].map((n, i) => h("th", { class: i > 2 ? "n" : "", scope: "col" }, n)))),
    h("tbody", {}, run.groups.map((g) => h("tr", {}, [g.name, g.platform, g.prices].map((v) => h("td", {}, v)), [g.first_rank + "–" + (g.first_rank + g.workers - 1), count(g.workers), count(g.memory_mb) + " MB", count(g.samples), count(g.iterations), number(g.gb_seconds, 4), usd(g.cost_usd), total ? Math.round(100 * g.cost_usd / total) + "%" : "–"].map((v) => h("td", { class: "n" }, v))))))));
}
