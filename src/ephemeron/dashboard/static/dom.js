// Elements and numbers. Text becomes text nodes, never markup: names, metrics and logs are the users'.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
    else if (name === "dataset") Object.assign(node.dataset, value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

export const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
export const s = (tag, properties, ...children) => fill(document.createElementNS(SVG, tag), properties, children);

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const colours = new Map();
addEventListener("themechange", () => colours.clear());

export function colour(name) {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim());
  return colours.get(name);
}

const known = (v) => v !== null && v !== undefined && Number.isFinite(v);

export const count = (v) => (known(v) ? Math.round(v).toLocaleString("en-US") : "–");

export function number(v, digits = 4) {
  if (!known(v)) return "–";
  const a = Math.abs(v);
  if (a !== 0 && (a < 1e-3 || a >= 1e6)) return v.toExponential(2);
  return v.toPrecision(digits).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

export function usd(v) {
  if (!known(v)) return "–";
  const a = Math.abs(v);
  if (a === 0) return "$0";
  if (a >= 100) return "$" + v.toFixed(0).replace(/\B(?=(\d{3})+$)/g, ",");
  if (a >= 1) return "$" + v.toFixed(2);
  return "$" + v.toFixed(a >= 0.01 ? 4 : a >= 1e-4 ? 5 : 7);
}

export function seconds(v) {
  if (!known(v)) return "–";
  if (v === 0) return "0 s";
  if (v < 0.001) return Math.round(v * 1e6) + " µs";
  if (v < 1) return Math.round(v * 1000) + " ms";
  if (v < 60) return v.toFixed(1) + " s";
  const whole = Math.round(v), two = (n) => String(n).padStart(2, "0");
  if (whole < 3600) return Math.floor(whole / 60) + " min " + two(whole % 60) + " s";
  return Math.floor(whole / 3600) + " h " + two(Math.floor((whole % 3600) / 60)) + " min";
}

export function bytes(v) {
  if (!known(v)) return "–";
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (v >= size) return (v / size).toFixed(v >= 100 * size ? 0 : 1) + " " + unit;
  return v + " B";
}

export const percent = (v) => (known(v) ? (100 * v).toFixed(v < 0.1 ? 1 : 0) + "%" : "–");

export function when(unix) {
  if (!unix) return "–";
  const d = new Date(unix * 1000), two = (n) => String(n).padStart(2, "0");
  return d.getFullYear() + "-" + two(d.getMonth() + 1) + "-" + two(d.getDate()) + " " + two(d.getHours()) + ":" + two(d.getMinutes());
}

export const words = (text) => String(text).replace(/_/g, " ");
export const title = (text) => { const t = words(text); return t.charAt(0).toUpperCase() + t.slice(1); };
export const labels = (run) => Object.entries(run.labels || {}).map(([name, value]) => name + "=" + value);
export const pill = (status) => h("span", { class: "pill " + String(status).split(" ")[0] }, words(status));

export function announce(text) { setText(document.getElementById("announce"), text); }

export function nothing(head, ...rest) { return h("div", { class: "nothing" }, h("strong", {}, head), ...rest); }

export function card(name, options, ...children) {
  const { tools = [], note = "" } = options || {};
  return h("section", { class: "card", "aria-label": name }, h("div", { class: "title" }, h("h2", {}, name), note ? h("small", {}, note) : null, h("span", { class: "grow" }), tools), ...children);
}

export function choice(label, options, value, onchange) {
  const buttons = options.map(([key, name]) => h("button", { type: "button", "aria-pressed": String(key === value), onclick: () => pick(key) }, name));
  function pick(key) {
    options.forEach(([k], i) => buttons[i].setAttribute("aria-pressed", String(k === key)));
    onchange(key);
  }
  return h("span", { class: "choice", role: "group", "aria-label": label }, buttons);
}
