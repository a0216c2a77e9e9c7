// Where a message is typed: Enter sends, Shift+Enter breaks the line, Escape stops. Files of text, and pictures where the
// model takes some, are chosen, dropped or pasted. A draft survives a reload, its files do not.

import { chips, readAll } from "./attachments.js";
import { el, icon, iconButton, keyOf, onSubmit, recall, remember } from "./dom.js";

const KEY = "quire.drafts"; // in localStorage: { conversation id: text }
const MAX_DRAFTS = 50;

export function saveDraft(id, text) {
  const { [id]: _, ...others } = recall(KEY);
  const kept = Object.entries(text ? { ...others, [id]: text } : others).slice(-MAX_DRAFTS);
  remember(KEY, Object.fromEntries(kept));
}

export class Composer {
  #id = "";
  #isBusy = false;
  #files = [];
  #takesPictures = false;

  /** `send(text, files)` asks; `stop()` stops the answer. */
  constructor({ send, stop }) {
    this.send = send;
    this.stop = stop;
    const attrs = { "aria-label": "Message", enterkeyhint: "send" };
    this.input = el("textarea", { rows: 1, attrs, dir: "auto" });
    this.button = el("button", { type: "submit", className: "send" });
    this.chooser = el("input", { type: "file", multiple: true, hidden: true, attrs: { "aria-label": "Files of text" } });
    const attach = iconButton("Attach text files", "attach", () => this.chooser.click());
    this.album = el("input", { type: "file", accept: "image/*", multiple: true, hidden: true, attrs: { "aria-label": "Pictures" } });
    this.picture = iconButton("Attach pictures", "picture", () => this.album.click()); // a phone offers its camera, too
    this.chips = chips([]);
    this.element = el("form", { className: "composer" }, this.chips, attach, this.picture, this.chooser, this.album, this.input, this.button);
    this.setPictures(false);
    this.#listen();
    this.setBusy(false);
  }

  /** Show the draft of a conversation. */
  open(id) {
    this.#id = id;
    this.input.value = recall(KEY)[id] ?? "";
    this.#show([]);
  }

  /** Offer pictures, if the model takes some. */
  setPictures(areTaken) {
    this.#takesPictures = areTaken;
    this.picture.hidden = !areTaken;
  }

  /** Take files that are dropped on an element. */
  takeDrops(element) {
    element.addEventListener("drop", ({ dataTransfer }) => dataTransfer.files.length && this.#attach(dataTransfer.files));
  }

  async #attach(files) {
    const id = this.#id;
    const read = await readAll(this.#files, files, this.#takesPictures);
    if (id === this.#id) { // else another chat was opened meanwhile
      this.#show(read);
    }
    this.input.focus();
  }

  #show(files) {
    this.#files = files;
    const shown = chips(files, (removed) => {
      this.#show(files.filter((file) => file !== removed));
      this.input.focus();
    });
    this.chips.replaceWith(shown);
    this.chips = shown;
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
    if (!this.#isBusy && (text || this.#files.length)) {
      this.send(text, this.#files);
      this.input.value = "";
      this.#show([]);
      this.#changed();
    }
  }

  #changed() {
    saveDraft(this.#id, this.input.value);
  }

  #listen() {
    onSubmit(this.element, () => (this.#isBusy ? this.stop() : this.submit()));
    for (const chooser of [this.chooser, this.album]) {
      chooser.addEventListener("change", async () => {
        await this.#attach(chooser.files);
        chooser.value = ""; // so that the same file can be chosen again
      });
    }
    this.input.addEventListener("paste", (event) => {
      if (event.clipboardData.files.length) { // else it is text
        event.preventDefault();
        this.#attach(event.clipboardData.files);
      }
    });
    this.input.addEventListener("input", () => this.#changed());
    this.input.addEventListener("keydown", (event) => {
      if (keyOf(event) === "Enter" && !event.shiftKey) {
        event.preventDefault();
        this.submit();
      }
    });
  }
}
