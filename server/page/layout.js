// What is on the screen: the list of chats, the chats, and a panel with the engine or the requests. On narrow screens
// chats and panels are tabs and the list is a drawer; on wide ones the list and the panel can be hidden.

import { byId, keyOf, recall, remember } from "./dom.js";

const KEY = "quire.layout"; // in localStorage: { list, panel } as on wide screens
const PANELS = ["engine", "requests"];
const narrow = matchMedia("(max-width: 940px)");
const drawer = matchMedia("(max-width: 1239px)");
const root = document.documentElement;
const kept = { list: true, panel: "engine", ...recall(KEY) };
const state = { view: "chat", list: kept.list && !drawer.matches };

function apply() {
  remember(KEY, kept);
  const shown = narrow.matches ? state.view : kept.panel;
  root.dataset.view = state.view;
  root.toggleAttribute("data-list", state.list);
  for (const name of PANELS) {
    byId(`${name}-panel`).hidden = shown !== name;
    byId(`${name}-button`).setAttribute("aria-pressed", String(shown === name));
  }
  byId("list-button").setAttribute("aria-expanded", String(state.list));
  byId("chat-button").setAttribute("aria-pressed", String(state.view === "chat"));
}

function showView(view) {
  state.view = view;
  state.list &&= !drawer.matches;
  apply();
}

/** Show the chats; a drawer over them closes. */
export const showChats = () => showView("chat");

/** Show the engine, on wide screens beside the chats. */
export function showEngine() {
  kept.panel = narrow.matches ? kept.panel : "engine";
  showView(narrow.matches ? "engine" : state.view);
}

function showList(isShown) {
  state.list = isShown;
  kept.list = drawer.matches ? kept.list : isShown;
  apply();
}

byId("chat-button").addEventListener("click", showChats);
for (const name of PANELS) {
  byId(`${name}-button`).addEventListener("click", () => {
    if (narrow.matches) {
      showView(name);
    } else {
      kept.panel = kept.panel === name ? "" : name;
      apply();
    }
  });
}
byId("list-button").addEventListener("click", () => showList(!state.list));
byId("scrim").addEventListener("click", () => showList(false));
byId("history-panel").addEventListener("keydown", (event) => {
  if (keyOf(event) === "Escape" && drawer.matches) {
    showList(false);
    byId("list-button").focus();
  }
});
for (const query of [narrow, drawer]) {
  query.addEventListener("change", () => {
    state.list = kept.list && !drawer.matches;
    apply();
  });
}
apply();
