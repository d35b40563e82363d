"use strict";
// Zooms the timeline: the spans stretch by their viewBox, marks and ticks are placed anew.
(function () {
  const picture = document.querySelector(".timeline");
  if (!picture) return;
  const NS = picture.namespaceURI;
  const end = +picture.dataset.end, left = +picture.dataset.left, width = +picture.dataset.width, floor = +picture.dataset.floor;
  const spans = picture.querySelector(".spans"), ticks = picture.querySelector(".ticks"), pick = picture.querySelector(".pick");
  const marks = Array.from(picture.querySelectorAll(".mark"), (g) => ({ g: g, t: +g.dataset.t, y: +/([-\d.]+)\)/.exec(g.getAttribute("transform"))[1] }));
  const controls = document.querySelector(".controls"), slider = controls.querySelector("input");
  const tall = spans.viewBox.baseVal.height, top = +pick.getAttribute("y"), closest = end / 20000;
  let from = 0, span = end;

  function make(tag, attributes, words) {
    const node = document.createElementNS(NS, tag);
    for (const name in attributes) node.setAttribute(name, attributes[name]);
    if (words) node.textContent = words;
    ticks.appendChild(node);
  }

  function drawTicks() {
    const [size, unit] = span < 0.2 ? [0.001, "ms"] : from + span <= 150 ? [1, "s"] : span < 120 ? [1, "s"] : from + span <= 9000 ? [60, "min"] : [3600, "h"];
    const raw = span / size / 10, base = Math.pow(10, Math.floor(Math.log10(raw)));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * base).find((s) => s >= raw * 0.999);
    ticks.replaceChildren();
    for (let i = Math.ceil(from / size / step - 1e-9); i * step * size <= (from + span) * (1 + 1e-12); i++) {
      const x = left + (i * step * size - from) / span * width;
      make("line", { x1: x, x2: x, y1: top, y2: floor + 4, class: "grid" });
      make("text", { x: x, y: floor + 18, "text-anchor": "middle" }, i ? +(i * step).toPrecision(10) + " " + unit : "0");
    }
  }

  function show(a, s) {
    span = Math.min(end, Math.max(closest, s));
    from = Math.min(end - span, Math.max(0, a));
    spans.setAttribute("viewBox", from + " 0 " + span + " " + tall);
    for (const m of marks) {
      const x = (m.t - from) / span;
      m.g.style.display = x < -1e-9 || x > 1 + 1e-9 ? "none" : "";
      m.g.setAttribute("transform", "translate(" + (left + x * width) + " " + m.y + ")");
    }
    slider.disabled = span >= end;
    slider.value = span >= end ? 0 : 1000 * from / (end - span);
    drawTicks();
  }

  function timeAt(event) {
    const box = picture.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * picture.viewBox.baseVal.width;
    return Math.min(from + span, Math.max(from, from + (x - left) / width * span));
  }

  let began = null;
  function mark(event) {
    const now = timeAt(event), a = Math.min(began, now), b = Math.max(began, now);
    pick.setAttribute("x", left + (a - from) / span * width);
    pick.setAttribute("width", (b - a) / span * width);
    return [a, b - a];
  }
  picture.addEventListener("pointerdown", (e) => { if (e.button === 0 && e.pointerType !== "touch") began = timeAt(e); });
  picture.addEventListener("pointermove", (e) => { if (began !== null) mark(e); });
  window.addEventListener("pointerup", (e) => {
    if (began === null) return;
    const [a, s] = mark(e);
    began = null;
    pick.setAttribute("width", 0);
    if (s > span / 200) show(a, s);
  });
  picture.addEventListener("dblclick", () => show(0, end));
  slider.addEventListener("input", () => show(slider.value / 1000 * (end - span), span));
  controls.addEventListener("click", (e) => {
    const how = e.target.dataset.zoom;
    if (how === "all") show(0, end);
    else if (how) { const s = how === "in" ? span / 2 : span * 2; show(from + (span - s) / 2, s); }
  });
  window.addEventListener("beforeprint", () => show(0, end));
  controls.hidden = false;
  picture.classList.add("ready");
  show(0, end);
})();
