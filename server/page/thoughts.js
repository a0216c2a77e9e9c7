// A model's thoughts: a box that is open while it thinks and folds when the answer begins, unless it was clicked.

import { el } from "./dom.js";
import { Markdown } from "./markdown.js";

export class Thoughts {
  #written = 0;
  #isTouched = false;
  #isEnded = false;
  #sinceMs = NaN;

  constructor() {
    this.title = el("summary", { textContent: "Thinking" });
    this.text = el("div", { className: "thoughts-text" });
    this.element = el("details", { className: "thoughts", hidden: true }, this.title, this.text);
    this.markdown = new Markdown(this.text);
    this.title.addEventListener("click", () => {
      this.#isTouched = true;
    });
  }

  /** Show more thoughts; `isThinking` until the answer begins, `seconds` are what they took. */
  update(reasoning, isThinking, seconds) {
    if (!reasoning) {
      return;
    }
    this.#sinceMs = this.#written ? this.#sinceMs : performance.now();
    this.element.hidden = false;
    this.markdown.write(reasoning.slice(this.#written));
    this.#written = reasoning.length;
    this.markdown.render();
    if (!isThinking) {
      this.end(seconds);
      return;
    }
    this.element.open ||= !this.#isTouched;
    this.element.classList.add("thinking");
    this.title.textContent = `Thinking for ${Math.floor((performance.now() - this.#sinceMs) / 1000)} s`;
  }

  /** The thoughts are complete. */
  end(seconds) {
    if (this.#isEnded) {
      return;
    }
    this.#isEnded = true;
    this.markdown.end();
    this.element.classList.remove("thinking");
    const rounded = seconds < 10 ? seconds.toFixed(1) : Math.round(seconds);
    this.title.textContent = Number.isFinite(seconds) ? `Thought for ${rounded} s` : "Thoughts";
    this.element.open &&= this.#isTouched;
  }
}
