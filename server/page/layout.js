// What is on the screen: the list of chats, the chats, the engine. On narrow screens chats and engine are tabs and the
// list is a drawer; on wide ones each can be hidden.

import { byId } from "./dom.js";

const KEY = "quire.layout"; // in localStorage: { list, engine } as on wide screens
const narrow = matchMedia("(max-width: 940px)");
const drawer = matchMedia("(max-width: 1239px)");
const root = document.documentElement;
const kept = { list: true, engine: true };

try {
  Object.assign(kept, JSON.parse(localStorage.getItem(KEY)));
} catch {
  // as at first
}

const state = { view: "chat", list: kept.list && !drawer.matches };

function keep() {
  try {
    localStorage.setItem(KEY, JSON.stringify(kept));
  } catch {
    // not kept
  }
}

function apply() {
  root.dataset.view = state.view;
  root.toggleAttribute("data-list", state.list);
  root.toggleAttribute("data-engine", kept.engine);
  byId("list-button").setAttribute("aria-expanded", String(state.list));
  byId("engine-button").setAttribute("aria-pressed", String(narrow.matches ? state.view === "engine" : kept.engine));
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
  if (narrow.matches) {
    showView("engine");
  } else if (!kept.engine) {
    kept.engine = true;
    keep();
    apply();
  }
}

function showList(isShown) {
  state.list = isShown;
  if (!drawer.matches) {
    kept.list = isShown;
    keep();
  }
  apply();
}

byId("chat-button").addEventListener("click", showChats);
byId("engine-button").addEventListener("click", () => {
  if (narrow.matches) {
    showView("engine");
  } else {
    kept.engine = !kept.engine;
    keep();
    apply();
  }
});
byId("list-button").addEventListener("click", () => showList(!state.list));
byId("scrim").addEventListener("click", () => showList(false));
byId("history-panel").addEventListener("keydown", (event) => {
  if (event.key === "Escape" && drawer.matches) {
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
