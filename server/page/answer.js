// One answer on the page: thoughts, text, tool calls, figures, and what can be done with it. It shows a message of
// conversation.js and follows it while it grows.

import { curlCommand } from "./api.js";
import { CallCard } from "./calls.js";
import { button, copyButton, count, duration, el, iconButton } from "./dom.js";
import { Markdown } from "./markdown.js";
import { Thoughts } from "./thoughts.js";

const FINISHES = {
  length: "cut at max tokens",
  stopped: "stopped",
  interrupted: "interrupted",
  error: "not complete",
  content_filter: "filtered by the guard",
};

export class Answer {
  #markdown = null;
  #written = 0; // characters of the text that the Markdown has
  #cards = [];

  /** `actions`: retry, goOn, sendResults, request (to repeat it with curl), showJourney. */
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.thoughts = new Thoughts();
    this.text = el("div", { className: "text" });
    this.calls = el("div", { className: "calls" });
    this.facts = el("span", { className: "facts" });
    this.error = el("p", { className: "error", hidden: true, attrs: { role: "alert" } });
    this.command = el("pre", { className: "command", hidden: true, tabIndex: 0, attrs: { "aria-label": "Command" } });
    this.element = el("div", { className: "message answer" },
      this.thoughts.element, this.text, this.calls, this.error, this.#footer(), this.command);
    this.#markdown = new Markdown(this.text);
  }

  /** Show what the message has grown by. */
  update() {
    const { content, reasoning, calls, facts } = this.message;
    this.thoughts.update(reasoning, !content && !calls.length, facts.thought_s);
    this.#markdown.write(content.slice(this.#written));
    this.#written = content.length;
    this.#markdown.render();
    this.#showCalls();
    this.#showFacts();
  }

  setStreaming(isStreaming) {
    this.element.classList.toggle("streaming", isStreaming);
    this.element.classList.toggle("empty", isStreaming && !this.message.content && !this.message.reasoning);
  }

  /** The answer is complete, or will not be. */
  finish() {
    this.setStreaming(false);
    this.update();
    this.#markdown.end();
    this.thoughts.end(this.message.facts.thought_s);
    const { error, facts, content } = this.message;
    this.error.hidden = !error;
    this.error.textContent = error;
    this.goOn.hidden = !content || !["length", "stopped", "interrupted", "error"].includes(facts.finish);
    this.#cards.forEach((card) => card.finish());
  }

  #showCalls() {
    for (const call of this.message.calls.slice(this.#cards.length)) {
      const card = new CallCard(call, () => this.#resultChanged());
      this.#cards.push(card);
      this.calls.append(card.element);
    }
    this.#cards.forEach((card) => card.update());
  }

  /** The conversation goes on when every call has its result. */
  #resultChanged() {
    if (this.message.calls.every((call) => call.result !== null)) {
      this.actions.sendResults();
    }
  }

  #showFacts() {
    const { tokens, ttft, tpot, prompt_tokens: prompt, cached_tokens: cached, finish } = this.message.facts;
    const facts = [];
    if (tokens) {
      facts.push(`${count(tokens)} token${tokens === 1 ? "" : "s"}`);
      facts.push(...(tpot > 0 ? [`${count(1 / tpot)} tokens/s`] : []), `TTFT ${duration(ttft)}`);
      facts.push(...(cached ? [`${count(cached)} of ${count(prompt)} cached`] : []));
    }
    const isStreaming = this.element.classList.contains("streaming");
    if (!isStreaming && finish in FINISHES) {
      facts.push(FINISHES[finish]);
    }
    this.journey.hidden = !this.message.facts.tag;
    this.facts.textContent = facts.map((fact) => fact.replaceAll(" ", "\u00a0")).join("  ·  ");
    const explained = `${duration(ttft)} to the first token, ${duration(tpot)} for each one after it`;
    this.facts.title = tokens ? `${explained}; ${count(cached)} of ${count(prompt)} prompt tokens were cached` : "";
  }

  #footer() {
    const copy = copyButton("Copy answer", () => this.message.content, this.text);
    const retry = iconButton("Retry", "retry", () => this.actions.retry());
    const curl = iconButton("Show as curl command", "terminal", () => this.#toggleCommand(curl));
    curl.setAttribute("aria-expanded", "false");
    this.journey = iconButton("Show its journey", "journey", () => this.actions.showJourney(this.message.facts.tag));
    this.goOn = button("Continue", { className: "link", hidden: true, onclick: () => this.actions.goOn() });
    return el("div", { className: "footer" },
      el("span", { className: "actions" }, this.goOn, copy, retry, curl, this.journey), this.facts);
  }

  #toggleCommand(toggle) {
    const { command } = this;
    command.hidden = !command.hidden;
    toggle.setAttribute("aria-expanded", String(!command.hidden));
    if (!command.hidden) {
      const { path, body } = this.actions.request();
      const code = el("code", { textContent: curlCommand(path, body) });
      command.replaceChildren(copyButton("Copy command", () => code.textContent, code), code);
    }
  }
}
