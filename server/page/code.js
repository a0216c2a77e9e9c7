// A block of code: its language, a button that copies it, and text that grows at its end.

import { button, copyText, el } from "./dom.js";
import { highlight } from "./highlight.js";

export class CodeBlock {
  #text = document.createTextNode("");
  #new = []; // lines and parts of lines that are not drawn yet
  #isEmpty = true;

  /** `fence` closes it; its lines lose up to `indent` spaces. */
  constructor(language, { fence = "", indent = 0 } = {}) {
    Object.assign(this, { language, fence, indent });
    const name = language || "code";
    this.code = el("code", {}, this.#text);
    const pre = el("pre", { tabIndex: 0, attrs: { "aria-label": `Code: ${name}` } }, this.code);
    const copy = button("Copy code", { icon: "copy", className: "icon-button" });
    copy.onclick = () => copyText(this.code.textContent, copy, this.code);
    const head = el("div", { className: "code-head" }, el("span", { textContent: name }), copy);
    this.element = el("div", { className: "code", dir: "ltr" }, head, pre);
  }

  /** Begin a line. */
  addLine(text) {
    this.add(this.#isEmpty ? text : `\n${text}`);
    this.#isEmpty = false;
  }

  /** Add to the last line. */
  add(text) {
    this.#new.push(text);
  }

  render() {
    this.#text.appendData(this.#new.join(""));
    this.#new = [];
  }

  /** Colour the complete code. */
  close() {
    this.render();
    this.code.replaceChildren(...highlight(this.#text.data, this.language));
  }
}
