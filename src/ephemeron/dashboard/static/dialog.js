// A question before something is ended, and a drawer at the side.
import { announce, h } from "./dom.js";

// Asks; `answers` are [label, class, action]. An action's promise gives a sentence, or fails with a reason, which is shown.
export function ask(heading, text, answers) {
  const opener = document.activeElement;
  const problem = h("p", { class: "bad", role: "alert" });
  const cancel = h("button", { type: "button", onclick: () => box.close() }, "Cancel");
  const buttons = answers.map(([label, style, action]) => h("button", { type: "button", class: style, onclick: async () => {
    buttons.forEach((b) => { b.disabled = true; });
    problem.textContent = "";
    try { announce(await action()); box.close(); } catch (e) { problem.textContent = e.message; buttons.forEach((b) => { b.disabled = false; }); }
  } }, label));
  const box = h("dialog", { "aria-labelledby": "ask-heading" }, h("h2", { id: "ask-heading" }, heading), h("p", {}, text), problem, h("div", { class: "actions" }, cancel, buttons));
  box.addEventListener("close", () => { box.remove(); if (opener) opener.focus(); });
  document.body.append(box);
  box.showModal();
  cancel.focus();
}

export function drawer(heading, body, onclose) {
  const opener = document.activeElement;
  const box = h("dialog", { class: "drawer", "aria-label": heading }, h("div", { class: "tools" }, h("h2", {}, heading), h("span", { class: "grow" }), h("button", { type: "button", onclick: () => box.close() }, "Close")), body);
  box.addEventListener("close", () => { box.remove(); onclose(); if (opener) opener.focus(); });
  box.addEventListener("click", (e) => { if (e.target === box) box.close(); });
  document.body.append(box);
  box.showModal();
  return box;
}
