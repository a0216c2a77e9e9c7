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
    element.addEventListener("scroll", () => this.#look(), { passive: true });
    new ResizeObserver(() => this.follow()).observe(element);
  }

  toEnd() {
    this.#top = 0;
    this.#follows = true;
    this.follow();
  }

  /** Scroll to the end, unless the reader has scrolled up. */
  follow() {
    this.#look();
    if (this.#follows) {
      this.element.scrollTop = this.element.scrollHeight;
      this.#top = this.element.scrollTop;
    }
    this.button.hidden = this.#follows;
  }

  /** Notice what the reader did: a growing text never scrolls up, and one that shrinks stays at its end. */
  #look() {
    const { scrollTop, scrollHeight, clientHeight } = this.element;
    const rest = scrollHeight - scrollTop - clientHeight;
    if (scrollTop < this.#top && rest > 2) {
      this.#follows = false;
    } else if (rest < NEAR) {
      this.#follows = true;
    }
    this.#top = scrollTop;
    this.button.hidden = this.#follows;
  }
}
