// The way of each sequence through the engine, as the page has seen it: a band of its phases and a list of its events.
// The engine reports the times of arrival, admission, first token and end; the others are as exact as snapshots.

import { getJson } from "./api.js";
import { byId, count, duration, el, sequenceColour } from "./dom.js";

const MAX_JOURNEYS = 200;

export class Journeys {
  #journeys = new Map(); // by sequence id, oldest first: { last, events, endS, isExact, peakBlocks }
  #lastS = 0;
  #shownId = null;

  constructor() {
    byId("journey-close").addEventListener("click", () => this.show(null));
  }

  /** Take in a snapshot; sequences that are missing from it have ended. */
  add({ time_s: at, sequences, ended }) {
    if (at < this.#lastS) {
      this.#journeys.clear(); // the daemon was restarted, and sequence ids with it
    }
    this.#lastS = at;
    const living = new Set(sequences.map((sequence) => sequence.seq_id));
    for (const [seqId, journey] of this.#journeys) {
      journey.endS ??= living.has(seqId) ? null : at;
    }
    sequences.forEach((sequence) => this.#note(sequence, at));
    ended.forEach((end) => this.#end(end));
    while (this.#journeys.size > MAX_JOURNEYS) {
      this.#journeys.delete(this.#journeys.keys().next().value);
    }
    this.#draw();
  }

  /** Return the last states of the last `number` sequences that have ended, the latest first. */
  ended(number) {
    const ended = [...this.#journeys.values()].filter((journey) => journey.endS !== null);
    return ended.sort((a, b) => b.endS - a.endS).slice(0, number).map(({ last }) => last);
  }

  /** Show a sequence's journey, or none for null; return whether it is known. */
  show(seqId) {
    this.#shownId = seqId;
    this.#draw();
    byId("journey").scrollIntoView({ block: "nearest" });
    return this.#journeys.has(seqId);
  }

  /** Show the journey of the last sequence of a request; return whether it is known. */
  showOf(requestId) {
    const journey = [...this.#journeys.values()].findLast(({ last }) => requestId.startsWith(last.tag));
    if (journey) {
      this.#explain(journey, requestId);
    }
    return this.show(journey?.last.seq_id ?? null);
  }

  /** Ask why the prefix cache found no more of a request's prompt. */
  async #explain(journey, requestId) {
    const { prefix } = await getJson(`v1/requests/${requestId}`).catch(() => ({})); // the daemon may have forgotten it
    journey.prefix = prefix?.message;
    this.#draw();
  }

  #note(sequence, at) {
    const { seq_id: seqId, status, num_blocks: blocks } = sequence;
    const journey = this.#journeys.get(seqId) ?? { last: sequence, events: [], endS: null, isExact: false, peakBlocks: 0 };
    if (journey.isExact) {
      return; // the snapshot is older than the end
    }
    if (sequence.num_preemptions > journey.last.num_preemptions) {
      journey.events.push({ at, name: "preempted" });
    }
    if (journey.last.status === "preempted" && status !== "preempted") {
      journey.events.push({ at, name: "resumed" });
    }
    Object.assign(journey, { last: sequence, peakBlocks: Math.max(journey.peakBlocks, blocks) });
    this.#journeys.set(seqId, journey);
  }

  /** Take the daemon's numbers of a sequence's end, which no snapshot has. */
  #end(end) {
    const isIt = ({ last }) => ["tag", "prompt", "choice"].every((name) => last[name] === end[name]);
    const journey = [...this.#journeys.values()].findLast(isIt);
    if (!journey) {
      return;
    }
    const { last } = journey;
    const scheduledS = end.queue_s === null ? null : last.arrival_s + end.queue_s;
    const tokenS = end.num_tokens > last.num_prompt ? scheduledS + end.prefill_s : null;
    const times = { first_scheduled_s: scheduledS, first_token_s: tokenS };
    const numbers = { num_tokens: end.num_tokens, num_computed: end.num_tokens, num_preemptions: end.num_preemptions };
    Object.assign(journey, { endS: tokenS === null ? end.at_s : tokenS + end.decode_s, isExact: true });
    journey.last = { ...last, ...times, ...numbers, finish: end.finish_reason ?? "disconnect" };
  }

  #draw() {
    const journey = this.#journeys.get(this.#shownId);
    byId("journey").hidden = !journey;
    if (journey) {
      const { last, endS, peakBlocks } = journey;
      const stopS = endS ?? this.#lastS;
      const steps = stepsOf(journey, stopS).map(([at, text]) => el("li", {}, el("span", { textContent: at }), text));
      byId("journey-band").replaceChildren(...phases(last, stopS));
      byId("journey-events").replaceChildren(...steps);
      byId("journey-note").textContent = `sequence ${last.seq_id} of request ${last.tag}…, at most ${count(peakBlocks)} blocks`;
    }
  }
}

/** Return waiting, prefill and decoding as parts of one band, as long as they took. */
function phases(last, stopS) {
  const scheduledS = last.first_scheduled_s ?? stopS;
  const tokenS = last.first_token_s ?? stopS;
  const all = { waiting: scheduledS - last.arrival_s, prefill: tokenS - scheduledS, decoding: stopS - tokenS };
  return Object.entries(all).map(([name, seconds]) => {
    const part = el("i", { className: name, title: `${name}: ${duration(seconds)}` });
    part.style.flexGrow = Math.max(seconds, 0);
    part.style.setProperty("--own", sequenceColour(last.seq_id));
    return part;
  });
}

function stepsOf({ last, events, endS, isExact, prefix }, stopS) {
  const since = (at) => duration(Math.max(at - last.arrival_s, 0));
  const steps = [["0 ms", "arrived"]];
  if (last.first_scheduled_s !== null) {
    const cached = last.num_cached ? `, ${count(last.num_cached)} of them cached` : "";
    steps.push([since(last.first_scheduled_s), `admitted with ${count(last.num_prompt)} prompt tokens${cached}`]);
    steps.push(...(prefix ? [["", prefix]] : []));
  }
  if (last.first_token_s !== null) {
    const prefill = duration(last.first_token_s - last.first_scheduled_s);
    steps.push([since(last.first_token_s), `first token, after ${prefill} of prefill`]);
  }
  steps.push(...events.map(({ at, name }) => [`~${since(at)}`, name]));
  const answered = last.num_tokens - last.num_prompt;
  const isPaced = last.first_token_s !== null && answered > 1;
  const pace = isPaced ? `, ${duration((stopS - last.first_token_s) / (answered - 1))} each` : "";
  const state = endS === null ? last.status : "ended";
  const how = last.finish ? ` (${last.finish})` : "";
  steps.push([`${endS === null || isExact ? "" : "~"}${since(stopS)}`, `${state}: ${count(answered)} tokens${pace}${how}`]);
  return steps;
}
