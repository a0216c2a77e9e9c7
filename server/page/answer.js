// One answer while it streams and after: its text, its times and counts, and the command that asks the same.

import { curlCommand, streamJson } from "./api.js";
import { count, duration, el } from "./dom.js";

const PATHS = { chat: "v1/chat/completions", completion: "v1/completions" };

const newText = (choice) => choice?.delta?.content ?? choice?.text ?? "";

/** Times and counts of a stream, as its reader sees them. */
class Clock {
  #sentMs = performance.now();
  #firstMs = NaN;
  #lastMs = NaN;
  tokens = 0;

  /** Note a chunk, after which there are `tokens` tokens. */
  tick(tokens) {
    if (tokens > this.tokens) {
      this.#lastMs = performance.now();
      if (Number.isNaN(this.#firstMs)) {
        this.#firstMs = this.#lastMs;
      }
      this.tokens = tokens;
    }
  }

  get ttft() {
    return (this.#firstMs - this.#sentMs) / 1000;
  }

  get tpot() {
    return this.tokens > 1 ? (this.#lastMs - this.#firstMs) / 1000 / (this.tokens - 1) : NaN;
  }
}

export class Answer {
  text = "";
  tag = ""; // how the live view names this answer's sequence
  #clock = null;
  #finish = "";
  #abort = new AbortController();

  constructor(kind, body) {
    this.path = PATHS[kind];
    // Counts that are exact while it streams: a chunk may bring several tokens.
    this.body = { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    this.textElement = el("div", { className: "text" });
    this.facts = el("span", { className: "facts" });
    this.command = el("pre", { className: "command", hidden: true, tabIndex: 0 });
    this.command.append(el("code", { textContent: curlCommand(this.path, body) }));
    this.element = el("div", { className: "message answer" }, this.textElement, this.#footer(), this.command);
  }

  stop() {
    this.#abort.abort();
  }

  /** Stream to the end; call `onNews` after each change of the text. An error is shown in the message, not thrown. */
  async run(onNews) {
    this.#clock = new Clock();
    this.element.classList.add("streaming");
    try {
      for await (const chunk of streamJson(this.path, this.body, this.#abort.signal)) {
        this.#accept(chunk);
        onNews();
      }
    } catch (error) {
      this.#fail(error);
    }
    this.element.classList.remove("streaming");
    this.#showFacts();
  }

  #accept(chunk) {
    const [choice] = chunk.choices;
    this.tag ||= chunk.id.slice(chunk.id.indexOf("-") + 1);
    this.#finish = choice?.finish_reason ?? this.#finish;
    this.#clock.tick(chunk.usage?.completion_tokens ?? 0);
    const text = newText(choice);
    if (text) {
      this.text += text;
      this.textElement.append(text); // a text node: never markup
    }
    this.#showFacts();
  }

  #fail(error) {
    if (error.name === "AbortError") {
      this.#finish = "stopped";
      return;
    }
    const message = error instanceof TypeError ? "The server cannot be reached; is it still running?" : error.message;
    this.textElement.after(el("p", { className: "error", textContent: message, attrs: { role: "alert" } }));
  }

  #showFacts() {
    const { tokens, ttft, tpot } = this.#clock;
    const facts = [`TTFT ${duration(ttft)}`, `TPOT ${duration(tpot)}`, `${count(tokens)} tokens`];
    if (this.#finish && this.#finish !== "stop") {
      facts.push(this.#finish === "length" ? "cut at max tokens" : this.#finish);
    }
    this.facts.textContent = facts.join("  ·  ");
  }

  #footer() {
    const link = (textContent) => el("button", { type: "button", className: "link", textContent });
    const [toggle, copy] = [link("curl"), link("copy")];
    copy.hidden = true;
    toggle.setAttribute("aria-expanded", "false");
    toggle.onclick = () => {
      this.command.hidden = copy.hidden = !this.command.hidden;
      toggle.setAttribute("aria-expanded", String(!this.command.hidden));
    };
    copy.onclick = async () => {
      try {
        await navigator.clipboard.writeText(this.command.textContent);
        copy.textContent = "copied";
      } catch {
        getSelection().selectAllChildren(this.command); // browsers give pages over plain HTTP no clipboard
      }
    };
    return el("div", { className: "footer" }, this.facts, el("span", { className: "space" }), copy, toggle);
  }
}
