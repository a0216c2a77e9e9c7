// A chat card: its conversation, its composer, and the answer that is on its way. Several live side by side.

import { Answer } from "./answer.js";
import { el, sequenceColour } from "./dom.js";
import { isValid, sampling, systemPrompt } from "./settings.js";

const SUGGESTIONS = {
  chat: ["What is a quire of paper?", "Write a short poem about the sea.", "Explain how rainbows form."],
  completion: ["Once upon a time", "The recipe begins with", "def fibonacci(n):"],
};

export class Chat {
  #messages = []; // what a chat sends as its history
  #answer = null; // the one that streams

  /** `ask` is called with what was typed; the caller decides which chats it goes to. */
  constructor(number, { ask, close }) {
    this.name = `Chat ${number}`;
    const named = (what, more = {}) => ({ "aria-label": `${this.name}: ${what}`, ...more });
    this.kind = el("select", { className: "quiet", attrs: named("API") },
      new Option("Chat", "chat"), new Option("Completion", "completion"));
    this.log = el("div", { className: "log", tabIndex: 0, attrs: named("conversation", { role: "log" }) });
    this.input = el("textarea", { rows: 1, attrs: named("message") });
    this.button = el("button", { type: "submit", textContent: "Send" });
    const composer = el("form", { className: "composer" }, this.input, this.button);
    this.element = el("article", { className: "chat", attrs: { "aria-label": this.name } },
      this.#header(close), this.log, composer);
    this.#listen(composer, ask);
    this.clear();
  }

  get isBusy() {
    return this.#answer !== null;
  }

  focus() {
    this.input.focus();
  }

  stop() {
    this.#answer?.stop();
  }

  /** Forget the conversation; what streams is stopped. */
  clear() {
    this.stop();
    this.#messages = [];
    const kind = this.kind.value;
    this.input.placeholder = kind === "chat" ? "Ask something" : "Begin a text";
    const chips = SUGGESTIONS[kind].map((text) => {
      const fill = () => {
        this.input.value = text;
        this.focus();
      };
      return el("button", { type: "button", className: "chip", textContent: text, onclick: fill });
    });
    this.log.replaceChildren(el("div", { className: "suggestions" }, ...chips));
  }

  /** Send a text and stream its answer. */
  async send(text) {
    if (this.isBusy || !text || !isValid()) {
      return;
    }
    const kind = this.kind.value;
    this.log.querySelector(".suggestions")?.remove();
    const className = kind === "chat" ? "message question" : "message question prompt";
    this.log.append(el("div", { className, textContent: text }));
    const answer = new Answer(kind, this.#body(kind, text));
    this.log.append(answer.element);
    this.input.value = "";
    this.#setAnswer(answer);
    this.#scroll(true);
    await answer.run(() => this.#scroll(false));
    if (answer.text && kind === "chat" && this.log.contains(answer.element)) {
      this.#messages.push({ role: "user", content: text }, { role: "assistant", content: answer.text });
    }
    this.#setAnswer(null);
    this.#scroll(false);
  }

  /** Wear the colour of the sequence that writes the answer; `seqIds` maps tags to sequence ids. */
  paint(seqIds) {
    const tag = this.#answer?.tag ?? "";
    const seqId = tag ? seqIds.get(tag.slice(0, 8)) : undefined;
    this.element.style.setProperty("--own", seqId === undefined ? "" : sequenceColour(seqId));
  }

  #header(close) {
    const quiet = (properties) => el("button", { type: "button", className: "quiet", ...properties });
    const clear = quiet({ textContent: "Clear", onclick: () => this.clear() });
    const leave = quiet({ textContent: "×", title: "Close", attrs: { "aria-label": `Close ${this.name}` } });
    leave.onclick = () => {
      this.stop();
      close(this);
    };
    const title = el("h3", { textContent: this.name });
    const [dot, space] = [el("i", { className: "dot" }), el("span", { className: "space" })];
    return el("header", {}, dot, title, space, this.kind, clear, leave);
  }

  #body(kind, text) {
    if (kind === "completion") {
      return { ...sampling(), prompt: text };
    }
    const system = systemPrompt() ? [{ role: "system", content: systemPrompt() }] : [];
    return { ...sampling(), messages: [...system, ...this.#messages, { role: "user", content: text }] };
  }

  #setAnswer(answer) {
    this.#answer = answer;
    this.button.textContent = answer ? "Stop" : "Send";
    this.button.classList.toggle("stop", answer !== null);
    this.element.classList.toggle("busy", answer !== null);
    this.log.setAttribute("aria-busy", String(answer !== null)); // read out when complete, not token by token
    if (!answer) {
      this.element.style.removeProperty("--own");
    }
  }

  #scroll(always) {
    const { log } = this;
    if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 80) {
      log.scrollTop = log.scrollHeight; // follows the text unless the reader has scrolled up
    }
  }

  #listen(composer, ask) {
    composer.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.isBusy) {
        this.stop();
      } else {
        ask(this, this.input.value.trim());
      }
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.isBusy) {
          ask(this, this.input.value.trim());
        }
      }
    });
    this.element.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        this.stop();
      }
    });
    this.kind.addEventListener("change", () => this.clear());
  }
}
