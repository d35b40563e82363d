// Pages by the address after #, the theme, and the heading that says where one is.
import * as api from "./api.js";
import { h, nothing } from "./dom.js";
import * as runs from "./runs.js";
import * as run from "./run.js";
import * as studies from "./studies.js";
import * as study from "./study.js";
import * as regions from "./regions.js";
import * as services from "./services.js";
import * as tasks from "./tasks.js";

const PAGES = { runs, run, studies, study, regions, services, tasks };
const SECTION = { run: "runs", study: "studies" }, ALIAS = { data: "services" };
const main = document.getElementById("main");
let leave = null, before = "";

function show() {
  const [name, key] = address();
  const page = PAGES[name] || runs;
  if (leave) leave();
  leave = null;
  main.replaceChildren();
  for (const link of document.querySelectorAll("nav [data-page]")) {
    if (link.dataset.page === (SECTION[name] || name)) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = page.title + " · ephemeron";
  leave = page.mount(main, key) || null;
  if (before) { main.focus({ preventScroll: true }); scrollTo(0, 0); }
  before = location.hash;
}

function address() {
  const found = /^#\/(\w+)\/?(.*)$/.exec(location.hash);
  return found ? [ALIAS[found[1]] || found[1], decodeURIComponent(found[2])] : ["runs", ""];
}

// Theme: the system's, light or dark.
const THEMES = ["", "light", "dark"], SAID = { "": "as the system", light: "light", dark: "dark" }, SIGN = { "": "◐", light: "☀", dark: "☾" };
const button = document.getElementById("theme");

function said() {
  const chosen = document.documentElement.dataset.theme || "";
  button.textContent = SIGN[chosen];
  button.setAttribute("aria-label", "Colours: " + SAID[chosen]);
  button.title = "Colours: " + SAID[chosen];
}

button.addEventListener("click", () => {
  const root = document.documentElement, next = THEMES[(THEMES.indexOf(root.dataset.theme || "") + 1) % 3];
  if (next) root.dataset.theme = next; else delete root.dataset.theme;
  try { if (next) localStorage.setItem("ephemeron-theme", next); else localStorage.removeItem("ephemeron-theme"); } catch (e) { /* for this page only */ }
  said();
  dispatchEvent(new Event("themechange"));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("themechange")));
said();

addEventListener("hashchange", show);
api.open().then(show, (e) => main.replaceChildren(nothing("The dashboard does not answer.", h("span", {}, e.message))));
