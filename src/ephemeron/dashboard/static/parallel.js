// Parallel coordinates: an axis for each parameter and one for the value, a line for each trial.
import { colour, h, number, s, words } from "./dom.js";

const HEIGHT = 300, TOP = 34, BOTTOM = 26;

export function parallel(node, study, parameters) {
  const trials = study.trials.filter((t) => t.value !== null && t.value !== undefined), signature = JSON.stringify([trials, study.best, parameters, document.documentElement.dataset.theme]);
  if (node.dataset.is === signature) return;
  node.dataset.is = signature;
  if (trials.length < 2 || !parameters.length) { node.replaceChildren(h("p", { class: "nothing" }, "Shown once two trials have a value.")); return; }
  const value = "\u0000value", axes = [...parameters, value].map((name) => axis(name === value ? words(study.metric || "value") : words(name.split(".").pop()), trials.map((t) => (name === value ? t.value : t.parameters[name])), (t) => (name === value ? t.value : t.parameters[name])));
  const width = Math.max(560, 110 * axes.length), x = (i) => 50 + i * (width - 100) / (axes.length - 1), y = (share) => TOP + (1 - share) * (HEIGHT - TOP - BOTTOM);
  const values = trials.map((t) => t.value).sort((a, b) => a - b), best = study.mode === "max" ? 1 : 0;
  const rank = (v) => { const r = values.indexOf(v) / Math.max(1, values.length - 1); return best ? r : 1 - r; };
  const lines = [...trials].sort((a, b) => rank(a.value) - rank(b.value)).map((t) => {
    const points = axes.map((a, i) => [x(i), y(a.share(a.of(t)))]), r = rank(t.value);
    return s("path", { d: "M" + points.map((p) => p.map((v) => v.toFixed(1)).join(" ")).join("L"), class: t.number === study.best ? "best" : "", stroke: t.number === study.best ? colour("c1") : colour("c0"), "stroke-opacity": t.number === study.best ? 1 : (0.12 + 0.6 * r * r).toFixed(2) }, s("title", {}, "trial " + t.number + ": " + number(t.value)));
  });
  node.replaceChildren(s("svg", { viewBox: "0 0 " + width + " " + HEIGHT, role: "img", "aria-label": "Parameters and value of each trial; the same numbers are in the table of trials" }, lines, axes.map((a, i) => s("g", {},
    s("line", { x1: x(i), x2: x(i), y1: TOP, y2: HEIGHT - BOTTOM }), s("text", { x: x(i), y: 16, "text-anchor": "middle", class: "name" }, a.name.length > 18 ? a.name.slice(0, 17) + "…" : a.name),
    a.ticks.map(([label, share]) => s("text", { x: x(i) + (i === axes.length - 1 ? -6 : 6), y: y(share) + 4, "text-anchor": i === axes.length - 1 ? "end" : "start", "paint-order": "stroke", stroke: colour("card"), "stroke-width": 6, "stroke-linejoin": "round" }, label))))));
}

function axis(name, values, of) {
  const there = values.filter((v) => v !== undefined && v !== null);
  if (there.every((v) => typeof v === "number")) {
    const low = Math.min(...there), high = Math.max(...there), log = low > 0 && high / low >= 20, at = log ? Math.log : (v) => v, a = at(low), b = at(high);
    const middle = log ? Math.exp((a + b) / 2) : (a + b) / 2, few = [...new Set(there)].sort((p, q) => p - q);
    return { name, of, share: (v) => (b > a && v !== undefined && v !== null ? (at(v) - a) / (b - a) : 0.5), ticks: b > a ? (few.length <= 3 ? few.map((v) => [number(v, 3), (at(v) - a) / (b - a)]) : [[number(low, 3), 0], [number(middle, 2), 0.5], [number(high, 3), 1]]) : [[number(low, 3), 0.5]] };
  }
  const names = [...new Set(there.map(String))].sort((p, q) => p.localeCompare(q, "en", { numeric: true }));
  const share = (v) => (names.length > 1 ? Math.max(0, names.indexOf(String(v))) / (names.length - 1) : 0.5);
  return { name, of, share, ticks: names.map((n) => [n.length > 14 ? n.slice(0, 13) + "…" : n, share(n)]) };
}
