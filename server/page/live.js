// The live view: polls the engine's state while the page is visible, and updates the figures and drawings.

import { getJson } from "./api.js";
import { Chart } from "./chart.js";
import { byId, count, duration } from "./dom.js";
import { Journeys } from "./journey.js";
import { Pool } from "./pool.js";
import { Sequences } from "./sequences.js";

const POLL_MS = 200;
const LARGE_POLL_MS = 500; // a pool that is summarised costs the server some milliseconds a time
const RETRY_MS = 2000;
const WINDOW_S = 2; // over which tokens a second and TPOT are taken

export class Live {
  #samples = []; // snapshots of the last seconds, oldest first
  #timer = 0;
  #isAsking = false;
  #model = "";

  /** `onSnapshot` hears of every snapshot, `onError` of every failure to get one. */
  constructor({ onSnapshot, onError }) {
    Object.assign(this, { onSnapshot, onError, journeys: new Journeys() });
    this.blocks = new Chart("history", "Blocks in use", ["held", "cached"]);
    this.tokens = new Chart("throughput", "Tokens a second", ["generated"]);
    const reactions = { choose: (seqId) => this.pool.choose(seqId), open: (seqId) => this.journeys.show(seqId) };
    this.pool = new Pool(byId("pool"), byId("pool-note"), reactions);
    this.sequences = new Sequences(byId("sequences"), byId("sequences-note"), reactions);
    document.addEventListener("visibilitychange", () => this.start());
  }

  /** Ask repeatedly; a hidden page asks nothing. */
  start() {
    clearTimeout(this.#timer);
    if (!document.hidden && !this.#isAsking) {
      this.#ask();
    }
  }

  /** Show this model's engine from now on. */
  watch(model) {
    this.#model = model;
    this.#samples.length = 0;
    this.start();
  }

  async #ask() {
    let pause = POLL_MS;
    this.#isAsking = true;
    try {
      const query = new URLSearchParams({ ...this.pool.query, since: this.#samples.at(-1)?.time_s ?? 0 });
      if (this.#model) {
        query.set("model", this.#model);
      }
      const snapshot = await getJson(`v1/engine/live?${query}`);
      this.#show(snapshot);
      pause = snapshot.cells.blocks_per_cell > 1 ? LARGE_POLL_MS : POLL_MS;
    } catch (error) {
      pause = error.status === 401 ? Infinity : RETRY_MS; // the page starts again with the next key
      this.onError(error);
    }
    this.#isAsking = false;
    if (!document.hidden && pause !== Infinity) {
      this.#timer = setTimeout(() => this.#ask(), pause);
    }
  }

  #show(snapshot) {
    this.journeys.add(snapshot);
    this.pool.show(snapshot);
    this.sequences.show(snapshot, this.journeys);
    this.#showFigures(snapshot);
    this.onSnapshot(snapshot);
  }

  #showFigures(snapshot) {
    const samples = this.#samples;
    if (snapshot.totals.steps < samples.at(-1)?.totals.steps) {
      samples.length = 0; // the daemon was restarted
    }
    samples.push(snapshot);
    while (samples[1]?.time_s < snapshot.time_s - WINDOW_S) {
      samples.shift();
    }
    const [oldest] = samples;
    const seconds = snapshot.time_s - oldest.time_s;
    const rate = seconds ? (snapshot.totals.generation_tokens - oldest.totals.generation_tokens) / seconds : NaN;
    byId("running").textContent = count(snapshot.requests.running);
    byId("waiting").textContent = count(snapshot.requests.waiting + snapshot.requests.preempted);
    byId("rate").textContent = count(rate);
    this.blocks.add(snapshot.time_s, [snapshot.blocks.held, snapshot.blocks.cached]);
    if (seconds) {
      this.tokens.add(snapshot.time_s, [rate]);
    }
    for (const [id, name] of [["ttft", "ttft"], ["tpot", "itl"]]) { // means; without observations the last figure stays
      const number = snapshot[name].count - oldest[name].count;
      byId(id).textContent = number ? duration((snapshot[name].sum_s - oldest[name].sum_s) / number) : byId(id).textContent;
    }
  }
}
