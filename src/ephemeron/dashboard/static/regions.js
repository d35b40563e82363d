// Regions of all runs.
import * as api from "./api.js";
import { bytes, card, count, h, nothing, number, percent, pill, usd } from "./dom.js";

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
    body.replaceChildren(...(runs.length ? runs.map(one) : [nothing("No run is in several regions.", h("span", {}, "Train with ", h("code", {}, "--regions FILE"), ", or ", h("code", {}, "[[run.regions.region]]"), " in a job file. What each region does and costs appears here."))]));
  }, 2000);
  const end = api.follow("runs", "", load);
  return () => { end(); load.stop(); };
}

function one(run) {
  const exchanged = run.groups.some((g) => g.exchanges);
  const total = run.groups.reduce((sum, g) => sum + (g.cost_usd || 0), 0);
  return card(run.run_id, { tools: [pill(run.status), h("a", { href: "#/run/" + encodeURIComponent(run.key) }, "Run")] }, h("div", { class: "scroll" }, h("table", {}, h("caption", { class: "unseen" }, "Regions of " + run.run_id),
    h("thead", {}, h("tr", {}, ["Region", "Platform", "Prices", "Ranks", "Functions", "Memory", "Samples", "Iterations", "GB-s", "Cost", "Share"].map((n, i) => h("th", { class: i > 2 ? "n" : "", scope: "col" }, n)))),
    h("tbody", {}, run.groups.map((g) => h("tr", {}, [g.name, g.platform, g.prices].map((v) => h("td", {}, v)), [g.first_rank + "–" + (g.first_rank + g.workers - 1), count(g.workers), count(g.memory_mb) + " MB", count(g.samples), count(g.iterations), number(g.gb_seconds, 4), usd(g.cost_usd), total ? Math.round(100 * g.cost_usd / total) + "%" : "–"].map((v) => h("td", { class: "n" }, v)))))),
    exchanged ? exchanges(run) : null));
}

// What each region does: its pace, and what it has to do with the others.
function exchanges(run) {
  const most = Math.max(...run.groups.map((g) => g.steps_per_s || 0));
  const bar = (share, phase) => h("span", { class: "share", style: { margin: "0", "min-width": "90px" } }, h("i", { class: "ph-" + phase, style: { width: 100 * share + "%" } }));
  return h("table", {}, h("caption", { class: "unseen" }, "Exchange between the regions of " + run.run_id),
    h("thead", {}, h("tr", {}, ["Region", "Steps a second", "", "Exchanges", "Staleness", "Waiting", "", "Sent", "Received", "Sent (kernel)", "Received (kernel)"].map((n, i) => h("th", { class: i > 0 ? "n" : "", scope: "col" }, n)))),
    h("tbody", {}, run.groups.map((g) => h("tr", {}, h("td", {}, g.name), [number(g.steps_per_s, 3), bar(most ? g.steps_per_s / most : 0, "compute"), count(g.exchanges), count(g.staleness), percent(g.waiting_share), bar(g.waiting_share, "wait"), bytes(g.wan_bytes_sent), bytes(g.wan_bytes_received), g.wan_kernel_bytes_sent ? bytes(g.wan_kernel_bytes_sent) : "–", g.wan_kernel_bytes_sent ? bytes(g.wan_kernel_bytes_received) : "–"].map((v) => h("td", { class: "n" }, v))))));
}
