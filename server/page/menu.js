// A menu behind a button: arrow keys move, Escape and a click elsewhere close it.

import { button, el } from "./dom.js";

/** Return the element. `items()` gives [label, action] pairs each time it opens. */
export function menu(label, items) {
  const opener = button(label, { icon: "more", className: "icon-button" });
  const list = el("div", { className: "menu-list", hidden: true, attrs: { role: "menu", "aria-label": label } });
  const element = el("div", { className: "menu" }, opener, list);
  opener.setAttribute("aria-haspopup", "menu");

  const show = (isOpen) => {
    list.hidden = !isOpen;
    opener.setAttribute("aria-expanded", String(isOpen));
  };
  const choose = (act) => {
    show(false);
    opener.focus();
    act();
  };
  opener.onclick = () => {
    const made = items().map(([name, act]) =>
      el("button", { type: "button", textContent: name, onclick: () => choose(act), attrs: { role: "menuitem", tabindex: "-1" } }),
    );
    list.replaceChildren(...made);
    show(list.hidden);
    if (!list.hidden) {
      list.firstChild.focus();
    }
  };
  element.addEventListener("focusout", (event) => {
    if (!element.contains(event.relatedTarget)) {
      show(false);
    }
  });
  list.addEventListener("keydown", (event) => {
    const all = [...list.children];
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") {
      event.stopPropagation();
      choose(() => {});
    } else if (step) {
      event.preventDefault();
      all[(all.indexOf(document.activeElement) + step + all.length) % all.length].focus();
    }
  });
  show(false);
  return element;
}
