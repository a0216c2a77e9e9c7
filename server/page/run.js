// One request while it streams: it fills an answer (conversation.js) with text, thoughts, tool calls and figures.

import { streamJson } from "./api.js";

/** When the first and the last token arrived, and how many there are. */
class Clock {
  #sentMs = performance.now();
  #firstMs = NaN;
  #lastMs = NaN;
  #tokens = 0;

  /** Note a chunk, after which there are `tokens` tokens. */
  tick(tokens) {
    if (tokens > this.#tokens) {
      this.#lastMs = performance.now();
      this.#firstMs = Number.isNaN(this.#firstMs) ? this.#lastMs : this.#firstMs;
      this.#tokens = tokens;
    }
  }

  get figures() {
    const seconds = (this.#lastMs - this.#firstMs) / 1000;
    const known = {
      ttft: (this.#firstMs - this.#sentMs) / 1000,
      tpot: this.#tokens > 1 ? seconds / (this.#tokens - 1) : NaN,
    };
    // Only numbers can be kept as JSON.
    return { tokens: this.#tokens, ...Object.fromEntries(Object.entries(known).filter(([, value]) => value >= 0)) };
  }
}

export class Run {
  tag = ""; // how the live view names this answer's sequence
  #abort = new AbortController();
  #clock = new Clock();
  #thinksSince = NaN;
  #resultOf = new Map(); // of a stream's tool-call index: the call

  constructor({ path, body }, answer) {
    this.path = path;
    this.answer = answer;
    // Counts that are exact while it streams: a chunk may bring several tokens.
    this.body = { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  }

  stop() {
    this.#abort.abort();
  }

  /** Stream to the end, calling `onNews` after each chunk. An error is noted in the answer, not thrown. */
  async finish(onNews) {
    this.answer.error = "";
    this.answer.facts.finish = "interrupted"; // what a reload leaves behind
    try {
      for await (const chunk of streamJson(this.path, this.body, this.#abort.signal)) {
        this.#accept(chunk);
        onNews();
      }
    } catch (error) {
      this.#fail(error);
    }
    this.#endThoughts();
  }

  #accept(chunk) {
    const [choice] = chunk.choices;
    const { answer } = this;
    const delta = choice?.delta ?? { content: choice?.text };
    this.tag ||= chunk.id.slice(chunk.id.indexOf("-") + 1);
    answer.facts.tag = this.tag;
    this.#clock.tick(chunk.usage?.completion_tokens ?? 0);
    this.#note(chunk.usage, choice);
    const thought = delta.reasoning_content ?? delta.reasoning ?? "";
    if (thought) {
      this.#thinksSince = this.#thinksSince || performance.now();
      answer.reasoning += thought;
    }
    if (delta.content || delta.tool_calls) {
      this.#endThoughts();
    }
    answer.content += delta.content ?? "";
    (delta.tool_calls ?? []).forEach((part) => this.#addCall(part));
  }

  #addCall({ index, id, function: { name, arguments: text = "" } }) {
    if (!this.#resultOf.has(index)) {
      const call = { id, name, arguments: "", result: null };
      this.#resultOf.set(index, call);
      this.answer.calls.push(call);
    }
    this.#resultOf.get(index).arguments += text;
  }

  #note(usage, choice) {
    const { facts } = this.answer;
    Object.assign(facts, this.#clock.figures);
    if (usage) {
      facts.prompt_tokens = usage.prompt_tokens;
      facts.cached_tokens = usage.prompt_tokens_details?.cached_tokens ?? 0;
    }
    facts.finish = choice?.finish_reason ?? facts.finish;
  }

  #endThoughts() {
    if (!Number.isNaN(this.#thinksSince)) {
      this.answer.facts.thought_s = (performance.now() - this.#thinksSince) / 1000;
      this.#thinksSince = NaN;
    }
  }

  #fail(error) {
    if (error.name === "AbortError") {
      this.answer.facts.finish = "stopped";
      return;
    }
    const isLost = error instanceof TypeError;
    const begun = this.answer.content || this.answer.reasoning;
    this.answer.facts.finish = "error";
    this.answer.error = !isLost
      ? error.message
      : begun ? "The connection was lost before the answer was complete." : "The server cannot be reached. Is it running?";
  }
}
