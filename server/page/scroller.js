// Keeps the end of a scrolling element in sight, until the reader scrolls up.

import { button } from "./dom.js";

const NEAR = 40; // pixels from the end that count as the end

export class Scroller {
  #follows = true;
  #top = 0;

  constructor(element) {
    this.element = element;
    this.button = button("Scroll to the latest message", { icon: "down", className: "latest", hidden: true });
    this.button.onclick = () => this.toEnd();
    element.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    new ResizeObserver(() => this.follow()).observe(element);
  }

  toEnd() {
    this.#follows = true;
    this.follow();
  }

  /** Scroll to the end, if the reader is there. */
  follow() {
    if (this.#follows) {
      this.element.scrollTop = this.element.scrollHeight;
    }
    this.button.hidden = this.#follows;
  }

  #scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.element;
    const isAtEnd = scrollHeight - scrollTop - clientHeight < NEAR;
    if (isAtEnd) {
      this.#follows = true;
    } else if (scrollTop < this.#top) {
      this.#follows = false; // growing never scrolls up; only a reader does
    }
    this.#top = scrollTop;
    this.button.hidden = this.#follows || isAtEnd;
  }
}
