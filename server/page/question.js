// A message of the user: its text, and a field to edit it. Editing asks again from there.

import { chips } from "./attachments.js";
import { textOf } from "./conversation.js";
import { button, copyButton, el, iconButton, keyOf, onSubmit } from "./dom.js";

export class Question {
  /** `onEdit(text)` asks again with another text. */
  constructor(message, { onEdit }) {
    this.message = message;
    this.onEdit = onEdit;
    this.text = el("div", { className: "bubble", dir: "auto" }, chips(message.files ?? []), message.content);
    const copy = copyButton("Copy message", () => textOf(message), this.text);
    this.editButton = iconButton("Edit message", "edit", () => this.#edit());
    this.footer = el("div", { className: "footer" }, el("span", { className: "actions" }, copy, this.editButton));
    this.element = el("div", { className: "message question" }, this.text, this.footer);
  }

  #edit() {
    const input = el("textarea", { value: this.message.content, dir: "auto", attrs: { "aria-label": "Edited message" } });
    const send = el("button", { type: "submit", textContent: "Send" });
    const leave = () => {
      this.element.replaceChildren(this.text, this.footer);
      this.editButton.focus();
    };
    const cancel = button("Cancel", { className: "quiet", onclick: leave });
    const form = el("form", { className: "edit" }, chips(this.message.files ?? []), input, el("div", { className: "row" }, cancel, send));
    onSubmit(form, () => {
      if (input.value.trim() || this.message.files?.length) {
        this.onEdit(input.value.trim());
      }
    });
    form.addEventListener("keydown", (event) => {
      if (keyOf(event) === "Escape") {
        event.stopPropagation();
        leave();
      } else if (keyOf(event) === "Enter" && !event.shiftKey && event.target === input) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.element.replaceChildren(form);
    input.focus();
  }
}
