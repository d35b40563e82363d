// A table that sorts by its headings and keeps its rows when values change.
import { h } from "./dom.js";

// columns: {name, label, value(row) for sorting, cell(row) -> node or text, kind: "n" | "" | "wrap" | "tick", lead: names the row, sort: false}
export class Table {
  constructor(columns, { key, sort = null, descending = false, onrow = null, caption = "", tall = false, rowclass = null }) {
    this.columns = columns; this.key = key; this.onrow = onrow; this.rowclass = rowclass;
    this.sorted = sort; this.descending = descending; this.rows = []; this.nodes = new Map();
    this.heads = columns.map((c) => h("th", { class: c.kind === "n" ? "n" : "", scope: "col" }, c.sort === false ? c.label : h("button", { type: "button", onclick: () => this.sortBy(c.name) }, c.label)));
    this.body = h("tbody"); this.names = this.heads.map((head) => head.textContent);
    this.table = h("table", { class: "rows" }, caption ? h("caption", { class: "unseen" }, caption) : null, h("thead", {}, h("tr", {}, this.heads)), this.body);
    this.node = h("div", { class: tall ? "scroll tall" : "scroll", tabindex: "0", role: "region", "aria-label": caption }, this.table);
    this.mark();
  }

  sortBy(name) {
    this.descending = this.sorted === name ? !this.descending : this.columns.find((c) => c.name === name).kind === "n";
    this.sorted = name;
    this.mark();
    this.show(this.rows);
  }

  mark() {
    this.columns.forEach((c, i) => {
      if (c.name === this.sorted) this.heads[i].setAttribute("aria-sort", this.descending ? "descending" : "ascending");
      else this.heads[i].removeAttribute("aria-sort");
    });
  }

  show(rows) {
    this.rows = rows;
    const by = this.columns.find((c) => c.name === this.sorted);
    const ordered = by ? [...rows].sort((a, b) => compare(by.value(a), by.value(b)) * (this.descending ? -1 : 1) || compare(this.key(a), this.key(b))) : rows;
    const seen = new Set();
    let at = this.body.firstChild;
    for (const row of ordered) {
      const key = this.key(row), signature = JSON.stringify(row);
      let known = this.nodes.get(key);
      if (!known) { known = { node: h("tr", this.onrow ? { class: "link" } : {}), signature: "" }; this.nodes.set(key, known); }
      if (known.signature !== signature) {
        known.signature = signature;
        known.node.replaceChildren(...this.columns.map((c, i) => h("td", { class: (c.kind || "") + (c.lead ? " lead" : ""), dataset: { label: this.names[i] } }, c.cell(row))));
        if (this.onrow) known.node.onclick = (e) => { if (!e.target.closest("a, button, input, label")) this.onrow(row); };
      }
      if (this.rowclass) known.node.className = (this.onrow ? "link " : "") + this.rowclass(row);
      seen.add(key);
      if (known.node === at) at = at.nextSibling; else this.body.insertBefore(known.node, at);
    }
    for (const [key, known] of this.nodes) if (!seen.has(key)) { known.node.remove(); this.nodes.delete(key); }
  }
}

function compare(a, b) {
  const none = (v) => v === null || v === undefined || Number.isNaN(v);
  if (none(a) || none(b)) return none(a) - none(b);
  return typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
}

// A plain table as text alternative of a picture.
export function dataTable(caption, heads, rows) {
  const most = 200, step = Math.max(1, Math.ceil(rows.length / most));
  const shown = rows.filter((_, i) => i % step === 0 || i === rows.length - 1);
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, h("table", {}, h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, heads.map((n) => h("th", { class: "n", scope: "col" }, n)))), h("tbody", {}, shown.map((r) => h("tr", {}, r.map((v) => h("td", { class: "n" }, v)))))));
}
