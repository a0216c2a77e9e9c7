// The list of conversations: search, open, rename, delete.

import { button, byId, el, iconButton } from "./dom.js";

export class Sidebar {
  #rows = [];
  #open = new Set();
  #busy = new Set();

  /** `host`: open(id), rename(id, title), remove(id, title). */
  constructor(host) {
    this.host = host;
    this.list = byId("history-list");
    this.search = byId("history-search");
    this.search.addEventListener("input", () => this.#draw());
  }

  /** Show rows of the store; `open` and `busy` are sets of ids. */
  show(rows, open, busy) {
    [this.#rows, this.#open, this.#busy] = [rows, open, busy];
    this.#draw();
  }

  #draw() {
    const words = this.search.value.trim().toLowerCase();
    const found = this.#rows.filter(({ title }) => title.toLowerCase().includes(words));
    const focusedId = document.activeElement?.closest("#history-list li")?.dataset.id;
    const items = found.map((row) => this.#item(row));
    this.list.replaceChildren(...items);
    byId("history-empty").hidden = found.length > 0;
    byId("history-empty").textContent = words ? "No chat has this in its title." : "Chats that you begin are kept here, in this browser.";
    if (focusedId) {
      items.find((item) => item.dataset.id === focusedId)?.querySelector("button").focus();
    }
  }

  #item({ id, title }) {
    const open = button(title, { className: "open-chat", title, onclick: () => this.host.open(id) });
    if (this.#open.has(id)) {
      open.setAttribute("aria-current", "true");
    }
    const rename = iconButton(`Rename ${title}`, "edit", () => this.host.rename(id, title));
    const remove = iconButton(`Delete ${title}`, "trash", () => this.host.remove(id, title));
    const item = el("li", { className: this.#busy.has(id) ? "is-busy" : "" }, open, rename, remove);
    item.dataset.id = id;
    return item;
  }
}
