// Where a message is typed: Enter sends, Shift+Enter breaks the line, Escape stops. A draft survives a reload.

import { el, icon } from "./dom.js";

const KEY = "quire.drafts"; // in localStorage: { conversation id: text }
const MAX_DRAFTS = 50;

function readDrafts() {
  try {
    return JSON.parse(localStorage.getItem(KEY)) ?? {};
  } catch {
    return {};
  }
}

export function saveDraft(id, text) {
  const { [id]: _, ...others } = readDrafts();
  const kept = Object.entries(text ? { ...others, [id]: text } : others).slice(-MAX_DRAFTS);
  try {
    localStorage.setItem(KEY, JSON.stringify(Object.fromEntries(kept)));
  } catch {
    // no room: the draft stays on the page
  }
}

export class Composer {
  #id = "";
  #isBusy = false;

  /** `send(text)` returns whether the text was taken; `stop()` stops the answer. */
  constructor({ send, stop }) {
    this.send = send;
    this.stop = stop;
    const attrs = { "aria-label": "Message", enterkeyhint: "send" };
    this.input = el("textarea", { rows: 1, attrs, dir: "auto" });
    this.button = el("button", { type: "submit", className: "send" });
    this.element = el("form", { className: "composer" }, this.input, this.button);
    this.#listen();
    this.setBusy(false);
  }

  /** Show the draft of a conversation. */
  open(id, placeholder) {
    this.#id = id;
    this.input.value = readDrafts()[id] ?? "";
    this.input.placeholder = placeholder;
    this.setBusy(this.#isBusy);
  }

  fill(text) {
    this.input.value = text;
    this.input.focus();
    this.input.setSelectionRange(text.length, text.length);
    this.#changed();
  }

  setBusy(isBusy) {
    this.#isBusy = isBusy;
    const label = isBusy ? "Stop" : "Send";
    this.button.classList.toggle("stop", isBusy);
    this.button.title = label;
    this.button.setAttribute("aria-label", label);
    this.button.replaceChildren(icon(isBusy ? "stop" : "send"));
  }

  submit() {
    const text = this.input.value.trim();
    if (!this.#isBusy && text && this.send(text) !== false) {
      this.input.value = "";
      this.#changed();
    }
  }

  #changed() {
    saveDraft(this.#id, this.input.value);
  }

  #listen() {
    this.element.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#isBusy) {
        this.stop();
      } else {
        this.submit();
      }
    });
    this.input.addEventListener("input", () => this.#changed());
    this.input.addEventListener("keydown", (event) => {
      // Enter also ends the composition of a character; Safari reports that as key code 229.
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229) {
        event.preventDefault();
        this.submit();
      }
    });
  }
}
