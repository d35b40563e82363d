// Line charts: uPlot with the page's colours, a legend with values, and the numbers as a table.
import { colour, h, number } from "./dom.js";
import { dataTable } from "./table.js";

const HEIGHT = () => (innerWidth >= 1800 ? 300 : innerWidth < 640 ? 220 : 250);

export class Chart {
  // options: {label, x: axis label, y: format, log, empty, sync}
  constructor(options) {
    this.options = options;
    this.place = h("div", { class: "chart", role: "img", "aria-label": options.label });
    this.table = h("div");
    this.details = h("details", { class: "data", ontoggle: () => this.fillTable() }, h("summary", {}, "Numbers as a table"), this.table);
    this.node = h("div", {}, this.place, this.details);
    this.plot = null; this.series = []; this.log = false; this.shape = "";
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.place);
    this.onTheme = () => { this.shape = ""; this.draw(); };
    addEventListener("themechange", this.onTheme);
  }

  // series: [{label, x: [], y: [], colour: name, dash, width, points, right: on the right axis}]; lines: [{y, label, colour}]
  show(series, { x, log = false, lines = [] } = {}) {
    this.series = series.filter((one) => one.x.length); this.x = x; this.log = log; this.lines = lines;
    this.draw();
  }

  draw() {
    if (!this.series.length) {
      if (this.plot) { this.plot.destroy(); this.plot = null; this.shape = ""; }
      if (!this.place.firstChild) this.place.append(h("p", { class: "nothing" }, this.options.empty || "No numbers yet."));
      this.details.hidden = true;
      return;
    }
    this.details.hidden = false;
    const data = this.data();
    const shape = JSON.stringify([this.series.map((q) => [q.label, q.colour, q.dash, q.faint, q.right]), this.x, this.log, this.lines]);
    if (this.plot && shape === this.shape) { const kept = this.zoomed(); this.plot.setData(data, !kept); }
    else {
      if (this.plot) this.plot.destroy();
      this.place.replaceChildren();
      this.plot = new uPlot(this.settings(), data, this.place);
      this.shape = shape;
    }
    if (this.details.open) this.fillTable();
  }

  zoomed() {
    const s = this.plot.scales.x, d = this.plot.data[0];
    return s.min > d[0] || s.max < d[d.length - 1];
  }

  data() {
    if (this.series.length === 1) return [this.series[0].x, this.series[0].y.map((v) => this.ok(v))];
    return uPlot.join(this.series.map((q) => [q.x, q.y.map((v) => this.ok(v))]), this.series.map(() => [2]));
  }

  ok(v) { return v === null || (this.log && v <= 0) ? null : v; }

  settings() {
    const soft = colour("soft"), grid = colour("grid"), format = this.options.y || number;
    const font = "12px system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif";
    const axis = { stroke: soft, font: font, grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    const vertical = { ...axis, size: (u, values) => Math.max(44, 10 + 7 * Math.max(0, ...(values || []).map((v) => String(v || "").length))), gap: 6, space: 34, ...(this.options.whole ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5, 1e6] } : {}), values: (u, ticks) => ticks.map((v) => (v === null ? null : format(v))) };
    const scale = { distr: this.log ? 3 : 1, range: this.log ? undefined : (u, low, high) => this.range(low, high) }, two = this.series.some((q) => q.right);
    return {
      width: Math.max(200, this.place.clientWidth), height: HEIGHT(), padding: [10, two ? 0 : this.x === "time" ? 44 : 26, 0, 0],
      cursor: { y: false, points: { size: 6 }, drag: { x: true, y: false, setScale: true }, sync: this.options.sync ? { key: this.options.sync } : undefined },
      scales: { x: { time: false }, y: scale, ...(two ? { right: scale } : {}) },
      axes: [
        { ...axis, size: 34, gap: 6, space: 70, values: (u, ticks) => ticks.map((v) => (this.options.xFormat ? this.options.xFormat(v, this.x) : number(v, 6))) },
        vertical, ...(two ? [{ ...vertical, scale: "right", side: 1, grid: { show: false } }] : []),
      ],
      series: [{ label: this.x, value: (u, v) => (v === null ? "–" : this.options.xFormat ? this.options.xFormat(v, this.x) : number(v, 6)) },
        ...this.series.map((q) => ({
          label: q.label + (q.right ? " (right)" : ""), scale: q.right ? "right" : "y", stroke: colour(q.colour) + (q.faint ? "59" : ""), width: q.width || 1.8, dash: q.dash, spanGaps: true,
          points: { show: q.points || q.x.length === 1, size: 5, fill: colour(q.colour) }, value: (u, v) => (v === null || v === undefined ? "–" : format(v)),
        }))],
      legend: { markers: { width: 0, fill: (u, i) => u.series[i].stroke(u, i) } },
      hooks: { draw: [(u) => this.drawLines(u)], setCursor: [(u) => { if (u.cursor.idx === null || u.cursor.idx === undefined) this.showLast(u); }], setData: [(u) => this.showLast(u)], ready: [(u) => this.showLast(u)] },
    };
  }

  range(low, high) {
    const all = this.lines.filter((l) => l.fit).map((l) => l.y);
    const a = Math.min(low, ...all), b = Math.max(high, ...all), pad = (b - a || Math.abs(b) || 1) * 0.06;
    return [this.options.zero || (a >= 0 && a - pad < 0) ? 0 : a - pad, b + pad];
  }

  drawLines(u) {
    const c = u.ctx, ratio = devicePixelRatio;
    for (const line of this.lines) {
      const y = u.valToPos(line.y, "y", true);
      if (y < u.bbox.top - 1 || y > u.bbox.top + u.bbox.height + 1) continue;
      c.save();
      c.strokeStyle = c.fillStyle = colour(line.colour);
      c.setLineDash([5 * ratio, 4 * ratio]); c.lineWidth = 1.3 * ratio;
      c.beginPath(); c.moveTo(u.bbox.left, y); c.lineTo(u.bbox.left + u.bbox.width, y); c.stroke();
      c.font = `${11.5 * ratio}px system-ui, DejaVu Sans, sans-serif`; c.textAlign = "left";
      const above = y - 5 * ratio > u.bbox.top + 10 * ratio;
      c.fillText(line.label, u.bbox.left + 6 * ratio, above ? y - 5 * ratio : y + 14 * ratio);
      c.restore();
    }
  }

  // Without a cursor the legend has the last value of each line.
  showLast(u) {
    u.setLegend({ idxs: u.data.map((column) => { let i = column.length - 1; while (i > 0 && (column[i] === null || column[i] === undefined)) i--; return i; }) }, false);
  }

  fillTable() {
    if (!this.details.open) return;
    const format = this.options.y || number, d = this.data(), n = d[0].length;
    const rows = Array.from({ length: n }, (_, i) => [this.options.xFormat ? this.options.xFormat(d[0][i], this.x) : number(d[0][i], 6), ...d.slice(1).map((c) => (c[i] === null || c[i] === undefined ? "" : format(c[i])))]);
    this.table.replaceChildren(dataTable(this.options.label, [this.x, ...this.series.map((q) => q.label)], rows));
  }

  resize() {
    if (this.plot && this.place.clientWidth && Math.abs(this.plot.width - this.place.clientWidth) > 1) this.plot.setSize({ width: this.place.clientWidth, height: HEIGHT() });
  }

  destroy() {
    this.observer.disconnect();
    removeEventListener("themechange", this.onTheme);
    if (this.plot) this.plot.destroy();
  }
}

// Lines of another magnitude than the first one go to the right axis: those beyond the widest gap, if that is a factor of five or more.
export function twoAxes(lines) {
  const size = new Map(lines.map((q) => [q, Math.max(...q.y.filter(Number.isFinite).map(Math.abs), 0)]));
  const ordered = [...new Set(size.values())].filter((v) => v > 0).sort((a, b) => a - b);
  let gap = 5, cut = 0;
  ordered.slice(1).forEach((v, i) => { if (v / ordered[i] >= gap) { gap = v / ordered[i]; cut = v; } });
  if (!cut) return lines;
  const first = lines.find((q) => size.get(q) > 0), isHigh = (q) => size.get(q) >= cut;
  return lines.map((q) => (size.get(q) > 0 && isHigh(q) !== isHigh(first) ? { ...q, right: true } : q));
}
