// One request while it streams: it fills an answer (conversation.js) with text, thoughts, tool calls and figures.

import { streamJson } from "./api.js";

export class Run {
  tag = ""; // how the live view names this answer's sequence
  #abort = new AbortController();
  #sentMs = performance.now();
  #firstMs = 0; // of the first token
  #tokens = 0;
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
    answer.facts.finish = choice?.finish_reason ?? answer.facts.finish;
    this.#count(chunk.usage ?? {});
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

  #count({ completion_tokens: tokens, prompt_tokens, prompt_tokens_details: details }) {
    if (tokens > this.#tokens) {
      const nowMs = performance.now();
      this.#firstMs ||= nowMs;
      this.#tokens = tokens;
      const ttft = (this.#firstMs - this.#sentMs) / 1000;
      const tpot = tokens > 1 ? { tpot: (nowMs - this.#firstMs) / 1000 / (tokens - 1) } : {}; // NaN cannot be kept as JSON
      Object.assign(this.answer.facts, { tokens, ttft, ...tpot, prompt_tokens, cached_tokens: details?.cached_tokens ?? 0 });
    }
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
