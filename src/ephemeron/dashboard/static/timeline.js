// What every function did, by phase: a canvas of tiles, which the server makes for each zoom, with marks on top.
import * as api from "./api.js";
import { colour, h, seconds, setText, words } from "./dom.js";
import { SHAPES, drawMark } from "./marks.js";

const LEFT = 46, TOP = 16, BOTTOM = 24, MOST_TILES = 160;
const MIXED = 8;
// Pixels of a lane and of the bar in it, by the number of lanes.
const SIZES = [[16, 27, 20], [48, 15, 12], [100, 7, 6], [Infinity, 4, 4]];

const KEYS = "Drag or ← → to move, Ctrl + wheel or + − to zoom, 0 for the whole run. Where a column holds several phases, ";

export class Timeline {
  constructor(key, { phases, columns }) {
    this.key = key; this.phases = phases; this.columns = columns;
    this.tiles = new Map(); this.wanted = new Map(); this.marks = []; this.ranks = []; this.lane = 27; this.bar = 20; this.mixed = false;
    this.end = 0; this.version = 0; this.from = 0; this.to = 1; this.follows = true; this.live = false;
    this.canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": "What each function did, by time", "aria-describedby": "timeline-keys" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.frame = h("div", { class: "frame" }, this.canvas);
    this.keys = h("p", { id: "timeline-keys", class: "note" });
    this.node = h("div", { class: "timeline" }, this.legend(), this.frame, this.tip, this.keys);
    this.tools = [this.button("−", "Zoom out", () => this.zoom(2)), this.button("+", "Zoom in", () => this.zoom(0.5)), this.button("Whole run", "Show the whole run", () => this.fit())];
    this.painted = null;
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.frame);
    this.onTheme = () => { for (const t of this.tiles.values()) t.picture = null; this.request(); };
    addEventListener("themechange", this.onTheme);
    this.listen();
  }

  button(text, label, action) { return h("button", { type: "button", class: "small", "aria-label": label, title: label, onclick: action }, text); }

  legend() {
    this.shapes = h("span", { class: "shapes" });
    return h("div", { class: "legend" }, this.phases.map((p) => h("span", {}, h("i", { class: "key ph-" + p }), p)), h("span", {}, h("i", { class: "key ph-alive" }), "no phase known"), this.shapes);
  }

  update({ ranks, seconds: end, version, live }) {
    const whole = this.to >= this.end * 0.999 || this.end === 0, all = this.from === 0 && whole;
    this.live = live;
    const grown = end > this.end;
    if (ranks.length !== this.ranks.length) this.tiles.clear();
    this.ranks = ranks; this.end = end;
    if (version !== this.version) { this.version = version; }
    if (all) { this.from = 0; this.to = end || 1; } else if (grown && whole && this.follows) { const span = this.to - this.from; this.to = end; this.from = end - span; }
    [, this.lane, this.bar] = SIZES.find(([most]) => ranks.length <= most);
    this.mixed = ranks.length > 48;
    setText(this.keys, KEYS + (this.mixed ? "their colours are mixed." : "their shares are stacked."));
    this.resize();
  }

  setMarks(marks) {
    this.marks = marks;
    const kinds = [...new Set(marks.map((m) => m.kind))];
    this.shapes.replaceChildren(...kinds.filter((k) => SHAPES[k]).map((k) => { const c = h("canvas", { width: "16", height: "16" }); drawMark(c.getContext("2d"), k, 8, 8, 1); return h("span", {}, c, SHAPES[k]); }));
    this.request();
  }

  resize() {
    const width = Math.max(200, this.frame.clientWidth), height = TOP + this.lane * this.ranks.length + BOTTOM, ratio = devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio); this.canvas.height = Math.round(height * ratio);
      this.canvas.style.height = height + "px";
    }
    this.width = width; this.height = height; this.plot = Math.max(50, width - LEFT - 8);
    this.request();
  }

  request() { if (!this.pending) this.pending = requestAnimationFrame(() => { this.pending = 0; this.draw(); }); }

  get level() { return Math.max(-20, Math.min(20, Math.floor(Math.log2((this.to - this.from) / this.plot)) + (this.mixed ? 1 : 0))); }
  x(t) { return LEFT + (t - this.from) / (this.to - this.from) * this.plot; }
  time(x) { return this.from + (x - LEFT) / this.plot * (this.to - this.from); }

  draw() {
    const c = this.canvas.getContext("2d", { alpha: false }), ratio = devicePixelRatio || 1;
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.fillStyle = colour("card");
    c.fillRect(0, 0, this.width, this.height);
    this.node.dataset.span = String(this.to - this.from);
    if (!this.ranks.length || !this.end) return;
    this.drawAxis(c);
    c.save();
    c.beginPath(); c.rect(LEFT, TOP, this.plot, this.lane * this.ranks.length); c.clip();
    const level = this.level, column = 2 ** level, tile = column * this.columns;
    for (let i = Math.floor(this.from / tile); i * tile < Math.min(this.to, this.end); i++) this.drawTile(c, level, i);
    c.restore();
    this.drawLabels(c);
    this.drawMarks(c);
    if (this.painted === null && [...this.tiles.values()].some((t) => t.data)) { this.painted = performance.now(); performance.mark("timeline-painted"); }
  }

  drawTile(c, level, index) {
    const tile = this.tile(level, index), a = index * 2 ** level * this.columns, b = a + 2 ** level * this.columns;
    if (tile.data) { this.place(c, tile, a, b, a, b); return; }
    for (let up = 1; up <= 8; up++) {  // a coarser picture until the right one is there
      const wide = 2 ** (level + up) * this.columns, k = Math.floor(a / wide), other = this.tiles.get((level + up) + "/" + k);
      if (other && other.data) { this.place(c, other, k * wide, (k + 1) * wide, a, b); return; }
    }
    const deeper = 2 ** (level - 1) * this.columns;
    for (const k of [2 * index, 2 * index + 1]) { const other = this.tiles.get((level - 1) + "/" + k); if (other && other.data) this.place(c, other, k * deeper, (k + 1) * deeper, k * deeper, (k + 1) * deeper); }
  }

  place(c, tile, begins, ends, a, b) {
    const picture = this.picture(tile), n = this.columns;
    const sx = (a - begins) / (ends - begins) * n, sw = (b - a) / (ends - begins) * n;
    const x0 = this.x(a), x1 = this.x(b);
    c.imageSmoothingEnabled = sw > (x1 - x0) * 1.01;
    c.drawImage(picture, sx, 0, sw, picture.height, x0, TOP, x1 - x0, picture.height);
  }

  tile(level, index) {
    const name = level + "/" + index;
    let tile = this.tiles.get(name);
    if (!tile) { tile = { level: level, index: index, data: null, version: -1, asked: 0 }; this.tiles.set(name, tile); }
    this.tiles.delete(name); this.tiles.set(name, tile);  // least recently used first
    if (this.tiles.size > MOST_TILES) this.tiles.delete(this.tiles.keys().next().value);
    const ends = (index + 1) * 2 ** level * this.columns, stale = tile.version < this.version && (tile.seenEnd === undefined || tile.seenEnd < ends + 5);
    if (stale && !tile.busy) {
      const rest = tile.asked + 900 - performance.now();
      if (tile.version < 0 || rest <= 0) this.load(tile);
      else if (!this.later) this.later = setTimeout(() => { this.later = null; this.request(); }, rest);
    }
    return tile;
  }

  async load(tile) {
    tile.busy = true; tile.asked = performance.now();
    const end = this.end;
    try {
      const got = await api.cells({ key: this.key, level: tile.level, index: tile.index, v: this.version });
      tile.data = got.data; tile.gotRows = got.rows; tile.version = got.version; tile.seenEnd = end; tile.picture = null;
      this.request();
    } catch (e) { tile.version = this.version; } finally { tile.busy = false; }
  }

  picture(tile) {
    if (tile.picture) return tile.picture;
    const rows = tile.gotRows, { lane, bar } = this, n = this.columns, lanes = Math.floor(tile.data.length / n / rows);
    const canvas = document.createElement("canvas");
    canvas.width = n; canvas.height = Math.max(1, lanes * lane);
    const c = canvas.getContext("2d"), image = c.createImageData(n, canvas.height), out = new Uint32Array(image.data.buffer);
    const palette = ["card", "alive", ...this.phases].map((name) => packed(colour(name)));
    for (let i = 0; i < lanes; i++) {
      if (rows === MIXED) mix(tile.data, i * rows * n, rows, n, palette, out, i * lane * n, bar);
      else for (let r = 0; r < Math.min(rows, bar); r++) for (let k = 0, from = (i * rows + r) * n, to = (i * lane + r) * n; k < n; k++) { const v = tile.data[from + k]; if (v) out[to + k] = palette[v]; }
    }
    c.putImageData(image, 0, 0);
    tile.picture = canvas;
    return canvas;
  }

  drawAxis(c) {
    const bottom = TOP + this.lane * this.ranks.length, span = this.to - this.from, rough = span / Math.max(2, this.plot / 110), power = 10 ** Math.floor(Math.log10(rough));
    const step = span > 300 ? ([15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400].find((v) => v >= rough) || 86400) : [1, 2, 5, 10].map((m) => m * power).find((v) => v >= rough);
    c.font = "11.5px system-ui, DejaVu Sans, sans-serif"; c.textAlign = "center"; c.fillStyle = colour("soft"); c.strokeStyle = colour("grid"); c.lineWidth = 1;
    for (let i = Math.ceil(this.from / step); i * step <= this.to; i++) {
      const x = Math.round(this.x(i * step)) + 0.5;
      c.beginPath(); c.moveTo(x, TOP); c.lineTo(x, bottom + 4); c.stroke();
      const label = clock(i * step, step);
      c.fillText(label, Math.min(x, this.width - c.measureText(label).width / 2), bottom + 17);
    }
  }

  drawLabels(c) {
    c.font = "11.5px system-ui, DejaVu Sans, sans-serif"; c.textAlign = "right"; c.textBaseline = "middle"; c.fillStyle = colour("soft");
    const every = Math.max(1, Math.ceil(14 / this.lane / 5) * 5), each = this.lane >= 14 ? 1 : every;
    this.ranks.forEach((rank, i) => { if (i % each === 0) c.fillText(String(rank), LEFT - 8, TOP + i * this.lane + Math.min(this.lane, this.bar + 2) / 2); });
    c.textBaseline = "alphabetic"; c.textAlign = "right";
    c.fillStyle = colour("faint"); c.fillText("rank", LEFT - 8, TOP - 5);
  }

  drawMarks(c) {
    const place = new Map(this.ranks.map((rank, i) => [rank, TOP + i * this.lane + this.bar / 2])), size = this.lane >= 14 ? 1 : 0.72, bottom = TOP + this.lane * this.ranks.length;
    this.shown = [];
    for (const m of this.marks) {
      if (m.t < this.from || m.t > this.to) continue;
      const x = this.x(m.t);
      if (m.rank === null) {
        c.strokeStyle = c.fillStyle = colour("ink"); c.lineWidth = 1.2; c.setLineDash([3, 3]);
        c.beginPath(); c.moveTo(x, TOP - 2); c.lineTo(x, bottom); c.stroke(); c.setLineDash([]);
        c.beginPath(); c.moveTo(x, TOP - 12); c.lineTo(x + 9, TOP - 7); c.lineTo(x, TOP - 2); c.fill();
        this.shown.push([x, TOP - 7, m]);
      } else if (place.has(m.rank)) {
        const y = place.get(m.rank);
        drawMark(c, m.kind, x, y, size);
        this.shown.push([x, y, m]);
      }
    }
  }

  zoom(factor, at = (this.from + this.to) / 2) {
    const span = Math.min(this.end * 1.02, Math.max(this.end / 1e6, 1e-4, (this.to - this.from) * factor)), share = (at - this.from) / (this.to - this.from);
    this.move(at - share * span, span);
  }

  move(from, span = this.to - this.from) {
    this.from = Math.max(0, Math.min(from, this.end - span)); if (span >= this.end) { this.from = 0; span = this.end; }
    this.to = this.from + span;
    this.request();
  }

  fit() { this.from = 0; this.to = this.end || 1; this.request(); }

  listen() {
    const canvas = this.canvas;
    let held = null;
    canvas.addEventListener("pointerdown", (e) => { if (e.button) return; held = { x: e.clientX, from: this.from }; canvas.setPointerCapture(e.pointerId); canvas.classList.add("held"); this.tip.hidden = true; });
    canvas.addEventListener("pointermove", (e) => { if (held) this.move(held.from - (e.clientX - held.x) / this.plot * (this.to - this.from)); else this.hover(e); });
    const drop = () => { held = null; canvas.classList.remove("held"); };
    canvas.addEventListener("pointerup", drop); canvas.addEventListener("pointercancel", drop);
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    canvas.addEventListener("dblclick", () => this.fit());
    canvas.addEventListener("wheel", (e) => {
      const sideways = e.shiftKey ? e.deltaY : e.deltaX;
      if (e.ctrlKey || e.metaKey) { e.preventDefault(); this.zoom(2 ** (e.deltaY / 200), this.time(e.offsetX)); } else if (Math.abs(sideways) > Math.abs(e.shiftKey ? 0 : e.deltaY)) { e.preventDefault(); this.move(this.from + sideways / this.plot * (this.to - this.from)); }
    }, { passive: false });
    canvas.addEventListener("keydown", (e) => {
      const span = this.to - this.from;
      const todo = { ArrowLeft: () => this.move(this.from - span / 8), ArrowRight: () => this.move(this.from + span / 8), "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.fit(), Home: () => this.move(0), End: () => this.move(this.end) }[e.key];
      if (todo && !e.ctrlKey && !e.metaKey && !e.altKey) { e.preventDefault(); todo(); }
    });
  }

  hover(e) {
    const near = (this.shown || []).find(([x, y]) => Math.abs(x - e.offsetX) < 7 && Math.abs(y - e.offsetY) < Math.max(5, this.lane / 2));
    const i = Math.floor((e.offsetY - TOP) / this.lane), t = this.time(e.offsetX);
    let text = "";
    if (near) text = (near[2].rank === null ? "" : "rank " + near[2].rank + " · ") + (SHAPES[near[2].kind] || words(near[2].kind)) + " · " + seconds(near[2].t) + "\n" + near[2].text;
    else if (i >= 0 && i < this.ranks.length && e.offsetX >= LEFT && t <= this.end) text = "rank " + this.ranks[i] + " · " + precise(t, this.to - this.from) + "\n" + this.phasesAt(i, t);
    this.tip.hidden = !text;
    this.tip.textContent = text;
    const top = this.frame.offsetTop - this.frame.scrollTop;
    this.tip.style.left = Math.min(e.offsetX + 14, this.width - 190) + "px"; this.tip.style.top = top + e.offsetY + 16 + "px";
  }

  phasesAt(i, t) {
    const level = this.level, wide = 2 ** level * this.columns, index = Math.floor(t / wide), tile = this.tiles.get(level + "/" + index);
    if (!tile || !tile.data) return "…";
    const k = Math.min(this.columns - 1, Math.floor((t - index * wide) / 2 ** level)), found = new Set();
    for (let r = 0; r < tile.gotRows; r++) found.add(tile.data[(i * tile.gotRows + r) * this.columns + k]);
    return [...found].sort().map((v) => (v === 0 ? "" : v === 1 ? "no phase known" : this.phases[v - 2])).filter(Boolean).join(", ") || "no function";
  }

  destroy() { this.observer.disconnect(); removeEventListener("themechange", this.onTheme); cancelAnimationFrame(this.pending); clearTimeout(this.later); }
}

// One colour for each column of a lane: the mean of its rows. Most columns have one phase, or the same mixture as the one before.
function mix(data, from, rows, n, palette, out, to, bar) {
  for (let k = 0; k < n; k++) {
    let r = 0, g = 0, b = 0, there = 0;
    for (let i = 0; i < rows; i++) { const v = data[from + i * n + k], p = palette[v]; if (v) there = 1; r += p & 255; g += (p >> 8) & 255; b += (p >> 16) & 255; }
    if (!there) continue;
    const mean = (0xff000000 | (Math.round(b / rows) << 16) | (Math.round(g / rows) << 8) | Math.round(r / rows)) >>> 0;
    for (let y = 0; y < bar; y++) out[to + y * n + k] = mean;
  }
}

function packed(text) {
  const v = parseInt(text.length === 4 ? [...text.slice(1)].map((d) => d + d).join("") : text.slice(1), 16);
  return (0xff000000 | ((v & 0xff) << 16) | (v & 0xff00) | (v >> 16)) >>> 0;
}

function clock(t, step) {
  if (step < 1) return t.toFixed(Math.min(6, Math.ceil(-Math.log10(step)))) + " s";
  if (t < 60 || step < 15) return (step < 1 ? t : Math.round(t)) + " s";
  const two = (n) => String(n).padStart(2, "0"), whole = Math.round(t), hours = Math.floor(whole / 3600);
  return (hours ? hours + ":" + two(Math.floor((whole % 3600) / 60)) : Math.floor(whole / 60)) + ":" + two(whole % 60);
}

const precise = (t, span) => (t >= 60 ? seconds(t) + " (" : "") + t.toFixed(span < 1 ? 5 : span < 60 ? 3 : 1) + " s" + (t >= 60 ? ")" : "");
