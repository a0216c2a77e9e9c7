// Records what the page has seen of each sequence: its state and length at every snapshot, while it lives and after.

const MAX_JOURNEYS = 200;
const MAX_SAMPLES = 400; // then every second one is dropped

export class Journeys {
  #journeys = new Map(); // by sequence id, oldest first
  #lastS = 0;

  /** Take in a snapshot; sequences that are missing from it have ended. */
  add({ time_s: at, sequences, ended }) {
    if (at < this.#lastS) {
      this.#journeys.clear(); // the daemon was restarted, and sequence ids with it
    }
    this.#lastS = at;
    const living = new Set(sequences.map((sequence) => sequence.seq_id));
    for (const [seqId, journey] of this.#journeys) {
      if (!living.has(seqId)) {
        journey.endS ??= at;
      }
    }
    for (const sequence of sequences) {
      this.#note(sequence, at);
    }
    ended.forEach((end) => this.#end(end));
    while (this.#journeys.size > MAX_JOURNEYS) {
      this.#journeys.delete(this.#journeys.keys().next().value);
    }
  }

  /** { samples, events, last, endS, isExact } of a sequence, or undefined. */
  get(seqId) {
    return this.#journeys.get(seqId);
  }

  /** The last sequence of the request whose id begins with a snapshot's tag, or null. */
  find(id) {
    const found = [...this.#journeys.values()].filter(({ last }) => id.startsWith(last.tag));
    return found.length ? found.at(-1).last.seq_id : null;
  }

  /** The last `number` sequences that have ended, the latest first. */
  ended(number) {
    const ended = [...this.#journeys.values()].filter((journey) => journey.endS !== null);
    return ended.sort((a, b) => b.endS - a.endS).slice(0, number);
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
    const endS = tokenS === null ? end.at_s : tokenS + end.decode_s;
    const { num_tokens: tokens, num_preemptions } = end;
    const times = { first_scheduled_s: scheduledS, first_token_s: tokenS };
    Object.assign(journey, { endS, isExact: true });
    journey.last = { ...last, ...times, num_tokens: tokens, num_computed: tokens, num_preemptions, finish: end.finish_reason ?? "disconnect" };
    journey.samples = journey.samples.filter((sample) => sample.at < endS);
    journey.samples.push({ at: endS, status: "ended", computed: tokenS === null ? last.num_computed : tokens, tokens });
  }

  #note(sequence, at) {
    const { seq_id: seqId, status, num_computed: computed, num_tokens: tokens, num_blocks: blocks } = sequence;
    if (!this.#journeys.has(seqId)) {
      this.#journeys.set(seqId, { samples: [], events: [], last: null, endS: null, isExact: false, peakBlocks: 0 });
    }
    const journey = this.#journeys.get(seqId);
    const before = journey.last;
    if (journey.isExact) {
      return; // the snapshot is older than the end
    }
    if (before && sequence.num_preemptions > before.num_preemptions) {
      journey.events.push({ at, name: "preempted" });
    }
    if (before?.status === "preempted" && status !== "preempted") {
      journey.events.push({ at, name: "resumed" });
    }
    journey.last = sequence;
    journey.peakBlocks = Math.max(journey.peakBlocks, blocks);
    journey.samples.push({ at, status, computed, tokens });
    if (journey.samples.length > MAX_SAMPLES) {
      journey.samples = journey.samples.filter((_, index) => index % 2 === 0);
    }
  }
}
