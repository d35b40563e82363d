// One run, live.
import * as api from "./api.js";
import { Chart, twoAxes } from "./chart.js";
import { ask } from "./dialog.js";
import { announce, bytes, card, choice, count, h, labels, nothing, number, percent, pill, seconds, setText, title as titled, usd, when, words } from "./dom.js";
import { Functions } from "./functions.js";
import { Timeline } from "./timeline.js";

export const title = "Run";
let axis = "iteration", log = false, metric = "";

export function mount(root, key) {
  let run = null, series = null, version = -1, parts = null, gone = false;
  const waiting = h("p", { class: "nothing", role: "status" }, "Reading the run…");
  root.append(waiting);

  const refresh = api.throttled(async () => {
    const [q, f, m] = await Promise.all([api.get("run/series", { key: key }), api.get("run/functions", { key: key }), api.get("run/marks", { key: key })]);
    if (gone || !parts) return;
    series = q;
    parts.functions.show(f.rows);
    parts.timeline.setMarks(m.marks);
    curves();
  }, 1200);

  function update(document) {
    const before = run && run.status;
    run = document;
    if (!parts) { waiting.remove(); parts = build(root, key, () => run, () => curves()); window.document.title = run.run_id + " · ephemeron"; }
    if (before && before !== run.status) announce("The run is " + words(run.status));
    parts.show(run);
    parts.timeline.update({ ranks: run.ranks, seconds: run.seconds, version: run.version, live: run.status === "running" });
    if (run.version !== version) { version = run.version; refresh(); }
  }

  function curves() {
    if (!series) return;
    const time = axis === "time", x = time ? "time" : "iteration", at = (c) => (time ? c.t : c.iteration), loss = series.loss;
    const lines = loss.smooth ? [{ label: "each iteration", x: at(loss), y: loss.value, colour: "c0", faint: true, width: 1 }, { label: "mean of " + loss.window, x: at(loss), y: loss.smooth, colour: "c0", width: 2 }] : [{ label: "training loss", x: at(loss), y: loss.value, colour: "c0" }];
    const e = series.evaluations, names = Object.keys(e.metrics);
    if (names.includes("loss")) lines.push({ label: "test loss", x: at(e), y: e.metrics.loss, colour: "c1", points: true });
    const others = names.filter((n) => n !== "loss"), regions = series.groups || [];
    if (regions.length) {
      lines.splice(0, lines.length, ...regions.flatMap((g, i) => [{ label: g.name, x: at(g.loss), y: g.loss.smooth || g.loss.value, colour: "c" + i % 8, faint: true, width: 1 }, { label: g.name + ", test", x: at(g.evaluations), y: g.evaluations.metrics.loss || [], colour: "c" + i % 8, points: true }]));
      measured(regions.flatMap((g, i) => others.map((n, k) => ({ label: g.name + ", test " + n, x: at(g.evaluations), y: g.evaluations.metrics[n] || [], metric: n, colour: "c" + (i + k * regions.length) % 8, points: true }))), x);
    }
    parts.loss.show(lines, { x: x, log: log });
    if (!regions.length) measured([...others.map((n, i) => ({ label: "test " + n, metric: n, x: at(e), y: e.metrics[n], colour: "c" + (i + 1) % 8, points: true })), ...Object.entries(series.metrics).map(([n, c], i) => ({ label: n, metric: n, x: at(c), y: c.smooth || c.value, colour: "c" + (i + others.length + 2) % 8 }))], x);
    const limits = [];
    if (run.budget_usd) limits.push({ y: run.budget_usd, label: "budget " + usd(run.budget_usd), colour: "bad", fit: run.cost_usd > run.budget_usd / 4 });
    if (run.predicted && run.predicted.cost_usd) limits.push({ y: run.predicted.cost_usd, label: "predicted " + usd(run.predicted.cost_usd), colour: "soft", fit: true });
    parts.cost.show(!run.is_priced ? [] : [{ label: "cost", x: series.cost.t, y: series.cost.usd, colour: "c0" }], { x: "time", lines: limits });
  }

  // All metrics, those of another scale on an axis of their own; or the one that is chosen.
  function measured(lines, x) {
    const names = [...new Set(lines.map((q) => q.metric))], chosen = names.includes(metric) ? metric : "";
    parts.choose(names, chosen);
    parts.metrics.show(twoAxes(lines.filter((q) => !chosen || q.metric === chosen)), { x: x, log: false });
  }

  const end = api.follow("run", key, update, () => { root.replaceChildren(nothing("There is no such run (any more).", h("a", { href: "#/runs" }, "All runs"))); });
  return () => { gone = true; end(); refresh.stop(); if (parts) parts.destroy(); };
}

function build(root, key, current, redraw) {
  const xFormat = (v, x) => (x === "time" ? seconds(v) : number(v, 6));
  const loss = new Chart({ label: "Loss", xFormat: xFormat, sync: "run", empty: "No iteration is done yet." });
  const metrics = new Chart({ label: "Metrics", xFormat: xFormat, sync: "run", empty: "No evaluation yet." });
  const cost = new Chart({ label: "Cost over time", xFormat: xFormat, y: usd, zero: true, empty: "No prices of this run are known." });
  const timeline = new Timeline(key, { phases: ["load", "compute", "upload", "aggregate", "download", "wait"], columns: 512 });
  const functions = new Functions(key);
  const heading = h("h1"), state = h("span"), under = h("div", { class: "under" }), reading = h("div", { class: "reading", role: "progressbar", "aria-label": "Reading the log", hidden: true }, h("i")), causes = h("div");
  const stop = h("button", { type: "button", class: "danger", onclick: () => confirm(current(), key) }, "End run…");
  const tiles = h("dl", { class: "tiles" }), tile = {};
  for (const [name, label] of [["iteration", "Iterations"], ["loss", "Training loss"], ["metric", "Metric"], ["cost", "Cost"], ["time", "Time"], ["functions", "Functions"]]) {
    tile[name] = { label: h("dt", {}, label), value: h("dd"), gauge: h("div", { class: "gauge", hidden: true }, h("i"), h("b", { hidden: true })), sub: h("dd", { class: "sub" }) };
    tile[name].box = h("div", {}, tile[name].label, tile[name].value, tile[name].gauge, tile[name].sub);
    tiles.append(tile[name].box);
  }
  const phases = h("div"), groups = h("div"), notes = h("div"), settings = h("div");
  const axisChoice = choice("Horizontal axis", [["iteration", "Iterations"], ["time", "Time"]], axis, (v) => { axis = v; redraw(); });
  const scale = choice("Vertical axis", [["linear", "Linear"], ["log", "Log"]], log ? "log" : "linear", (v) => { log = v === "log"; redraw(); });
  const which = h("select", { "aria-label": "Metric", hidden: true, onchange: () => { metric = which.value; redraw(); } });
  function choose(names, chosen) {
    which.hidden = names.length < 2;
    once(which, [names, chosen], () => [["", "All metrics"], ...names.map((n) => [n, n])].map(([v, n]) => h("option", { value: v, selected: v === chosen }, n)));
  }
  const learning = [card("Loss", { tools: [axisChoice, scale] }, loss.node), card("Metrics", { tools: [which] }, metrics.node)];
  root.append(
    h("div", { class: "head" }, heading, state, h("span", { class: "grow" }), stop, under), reading,
    h("div", { class: "stack" }, causes, tiles,
      h("div", { class: "columns" }, ...learning, card("Cost", {}, cost.node)),
      card("What each function did", { tools: timeline.tools }, timeline.node),
      groups, notes, h("div", { class: "columns wide" }, card("Time by phase", { note: "all functions together; phases may overlap" }, phases), card("Configuration", {}, settings)),
      card("Functions", { note: "choose one to read its log" }, functions.node)));

  function gauge(t, value, limit, mark) {
    t.gauge.hidden = !limit;
    if (!limit) return;
    t.gauge.firstChild.style.width = Math.min(100, 100 * (value || 0) / limit) + "%";
    t.gauge.classList.toggle("over", value > limit * 1.0001 && mark !== undefined);
    const b = t.gauge.lastChild;
    b.hidden = !(mark > 0 && mark < limit);
    if (!b.hidden) b.style.left = 100 * mark / limit + "%";
  }

  function put(t, value, small, sub) {
    const text = value + (small ? " " + small : "");
    if (t.shown !== text) { t.shown = text; t.value.replaceChildren(value, small ? h("small", {}, " " + small) : ""); }
    setText(t.sub, sub || "");
  }

  let before = "";
  function show(run) {
    setText(heading, run.run_id);
    if (state.dataset.is !== run.status) { state.dataset.is = run.status; state.replaceChildren(pill(run.status)); }
    stop.hidden = !(run.status === "running" || run.status.startsWith("on "));
    const trains = ["", "training", "regions", "sparse"].includes(run.kind);  // "": of an earlier release
    const facts = [run.job && (trains ? "job " : run.kind + " ") + run.job, run.platform, quotas(run), run.aggregators && run.aggregators + " aggregators", run.configuration.sync, run.wall_time ? "started " + when(run.wall_time) : "", ...labels(run)].filter(Boolean);
    const line = facts.join("|");
    if (line !== before) { before = line; under.replaceChildren(...facts.map((f) => h("span", {}, f)), run.study ? h("a", { href: "#/study/" + encodeURIComponent(run.study) }, "trial " + run.trial + " of its study") : "", h("code", {}, run.path)); }
    reading.hidden = run.share_read >= 1;
    reading.firstChild.style.width = 100 * run.share_read + "%"; reading.setAttribute("aria-valuenow", Math.round(100 * run.share_read));
    causes.replaceChildren(run.causes.length ? h("div", { class: "causes", role: "alert" }, h("pre", {}, run.causes.join("\n"))) : "");
    for (const node of [...learning, tile.loss.box, tile.metric.box]) node.hidden = !trains;
    tile.iteration.box.hidden = !trains && run.result.tasks === undefined;
    setText(tile.iteration.label, trains ? "Iterations" : "Tasks");
    const left = run.status === "running" && run.iterations_done > 2 && run.iterations ? run.seconds / run.iterations_done * (run.iterations - run.iterations_done) : null;
    if (!trains) put(tile.iteration, count(run.result.tasks || 0), "", [run.result.failed && count(run.result.failed) + " failed", run.result.cancelled && count(run.result.cancelled) + " cancelled"].filter(Boolean).join(", "));
    else put(tile.iteration, count(run.iterations_done), run.iterations ? "/ " + count(run.iterations) : "", run.epochs ? "epoch " + Math.min(run.epoch, run.epochs) + " of " + run.epochs : "");
    gauge(tile.iteration, run.iterations_done, run.iterations);
    put(tile.loss, number(run.loss), "", run.metrics.loss !== undefined ? "test " + number(run.metrics.loss) : "");
    const [name, value] = Object.entries(run.metrics).find(([n]) => n !== "loss") || ["Metric", null];
    setText(tile.metric.label, titled(name)); put(tile.metric, number(value), "", value === null ? "none yet" : "latest evaluation");
    const planned = run.predicted && run.predicted.cost_usd;
    put(tile.cost, run.is_priced ? usd(run.cost_usd) : "–", "", !run.is_priced ? "no prices" : [run.budget_usd ? percent(run.cost_usd / run.budget_usd) + " of " + usd(run.budget_usd) : "no budget", planned ? "predicted " + usd(planned) : ""].filter(Boolean).join(", "));
    gauge(tile.cost, run.cost_usd, (run.is_priced && (run.budget_usd || planned)) || 0, planned || 0);
    put(tile.time, seconds(run.seconds), "", [left !== null ? "about " + seconds(left) + " left" : "", run.predicted && run.predicted.seconds ? "predicted " + seconds(run.predicted.seconds) : ""].filter(Boolean).join(", "));
    gauge(tile.time, run.seconds, run.predicted ? run.predicted.seconds : 0, 0);
    const f = run.functions, extra = [f.replacements && f.replacements + " replaced", f.relays && f.relays + " relayed", f.failed && f.failed + " ended badly", run.faults && run.faults + (run.faults === 1 ? " fault" : " faults")].filter(Boolean);
    put(tile.functions, run.status === "running" ? count(f.running) : count(run.workers), run.status === "running" ? "running" : run.groups.length ? "" : "× " + count(run.memory_mb) + " MB", (run.groups.length ? quotas(run) + ", " : "") + count(f.invocations) + (f.invocations === 1 ? " invocation" : " invocations") + (extra.length ? ", " + extra.join(", ") : ""));
    functions.live = run.status === "running";
    share(phases, run); grouped(groups, run); remarks(notes, run); configuration(settings, run);
  }

  return { show, choose, loss, metrics, cost, timeline, functions, destroy: () => [loss, metrics, cost, timeline, functions].forEach((p) => p.destroy()) };
}

function quotas(run) {
  return run.groups.length ? run.groups.map((g) => g.name + " " + count(g.workers) + " × " + count(g.memory_mb) + " MB").join(", ") : run.workers + " × " + count(run.memory_mb) + " MB";
}

function once(node, value, make) {
  const signature = JSON.stringify(value);
  if (node.dataset.is === signature) return;
  node.dataset.is = signature;
  node.replaceChildren(...[make()].flat().filter(Boolean));
}

function share(node, run) {
  once(node, run.phases_s, () => {
    const all = Object.entries(run.phases_s), total = all.reduce((sum, [, v]) => sum + v, 0);
    if (!total) return h("p", { class: "nothing" }, "No function has worked yet.");
    return [h("div", { class: "share", role: "presentation" }, all.map(([p, v]) => h("i", { class: "ph-" + p, style: { width: 100 * v / total + "%" } }))),
      h("table", {}, h("caption", { class: "unseen" }, "Time by phase"), h("thead", {}, h("tr", {}, ["Phase", "Time", "Share"].map((n, i) => h("th", { class: i ? "n" : "", scope: "col" }, n)))), h("tbody", {}, all.map(([p, v]) => h("tr", {}, h("td", {}, h("i", { class: "key ph-" + p }), p), h("td", { class: "n" }, seconds(v)), h("td", { class: "n" }, percent(v / total))))))];
  });
}

function grouped(node, run) {
  once(node, [run.groups, run.generations, run.workers], () => [
    run.groups.length ? card("Regions", {}, rows(["Region", "Platform", "Functions", "Memory", "Samples", "Iterations", "Cost"], run.groups.map((g) => [g.name, g.platform, count(g.workers), count(g.memory_mb) + " MB", count(g.samples), count(g.iterations), usd(g.cost_usd)]), 2)) : null,
    run.generations.length ? card("Generations", { note: "changes of the functions during the run" }, rows(["Generation", "Cause", "From iteration", "Time", "Functions", "Memory"], run.generations.map((g) => [g.generation, g.request ? "request " + g.request : "schedule", count(g.iteration), seconds(g.t), count(g.workers), count(g.memory_mb) + " MB"]), 2)) : null,
  ]);
}

function remarks(node, run) {
  once(node, [run.notes, run.environment, run.unread], () => {
    const all = [...run.environment.map((text) => ({ level: "info", text: text, t: null })), ...run.notes, ...(run.unread ? [{ level: "warning", text: run.unread + " lines of the log could not be read", t: null }] : [])];
    return all.length ? card("Notes", {}, h("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Notes" }, h("table", {}, h("caption", { class: "unseen" }, "Notes"), h("tbody", {}, all.map((n) => h("tr", {}, h("td", { class: "n soft" }, n.t === null ? "" : seconds(n.t)), h("td", { class: { error: "bad", warning: "warn" }[n.level] || "soft" }, n.level), h("td", { class: "wrap" }, n.text))))))) : null;
  });
}

function configuration(node, run) {
  once(node, [run.configuration, run.traffic], () => h("dl", { class: "pairs" }, Object.entries({ ...run.configuration, puts: count(run.traffic.puts), gets: count(run.traffic.gets), polls: count(run.traffic.polls), uploaded: bytes(run.traffic.bytes_up), downloaded: bytes(run.traffic.bytes_down), ...(run.traffic.direct_bytes ? { "sent directly": bytes(run.traffic.direct_bytes) } : {}), checkpoint: run.checkpoint ? "iteration " + count(run.checkpoint) : "none yet" }).map(([k, v]) => h("div", {}, h("dt", {}, words(k)), h("dd", {}, Array.isArray(v) ? v.map((e) => (e && e.name) || (typeof e === "object" ? JSON.stringify(e) : e)).join(", ") : typeof v === "object" ? JSON.stringify(v) : String(v))))));
}

function rows(heads, values, texts) {
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, heads.map((n, i) => h("th", { class: i >= texts ? "n" : "", scope: "col" }, n)))), h("tbody", {}, values.map((r) => h("tr", {}, r.map((v, i) => h("td", { class: i >= texts ? "n" : "" }, v)))))));
}

function confirm(run, key) {
  const end = (now) => async () => (await api.post("run/end", { key: key, now: now })).text;
  ask("End " + run.run_id + "?", "It stops at its next checkpoint and can be resumed. Functions that are killed end at once; what they did since their checkpoint is repeated on resume.", [["Kill functions", "danger", end(true)], ["Stop at checkpoint", "danger sure", end(false)]]);
}
