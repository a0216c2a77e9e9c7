// The live view: polls the engine's state while the page is visible, and updates the figures and drawings.

import { getJson } from "./api.js";
import { Chart } from "./chart.js";
import { byId, count, duration } from "./dom.js";
import { JourneyView } from "./journey.js";
import { Journeys } from "./journeys.js";
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

  /** `onSnapshot` hears of every snapshot, `onError` of every failure to get one. */
  constructor({ onSnapshot, onError }) {
    this.onSnapshot = onSnapshot;
    this.onError = onError;
    this.blocks = new Chart(byId("history"), byId("history-note"), "Blocks in use", [
      { name: "held", fill: "--held", line: "--held-line" },
      { name: "cached", fill: "--cached", line: "--cached-line" },
    ]);
    this.tokens = new Chart(byId("throughput"), byId("throughput-note"), "Tokens a second", [
      { name: "generated", fill: "--held", line: "--held-line" },
    ]);
    const reactions = { choose: (seqId) => this.#choose(seqId), open: (seqId) => this.openJourney(seqId) };
    this.pool = new Pool(byId("pool"), byId("pool-note"), reactions);
    this.sequences = new Sequences(byId("sequences"), byId("sequences-note"), reactions);
    this.journeys = new Journeys();
    this.journey = new JourneyView({
      figure: byId("journey"),
      canvas: byId("journey-canvas"),
      note: byId("journey-note"),
      events: byId("journey-events"),
      close: byId("journey-close"),
    }, this.journeys);
    const redraw = () => this.draw();
    document.addEventListener("themechange", redraw);
    new ResizeObserver(redraw).observe(this.pool.canvas);
    document.addEventListener("visibilitychange", () => this.start());
  }

  /** Ask repeatedly; a hidden page asks nothing. */
  start() {
    clearTimeout(this.#timer);
    if (!document.hidden && !this.#isAsking) {
      this.#ask();
    }
  }

  /** Show the journey of a request's last sequence; returns whether it is known. */
  openJourneyOf(tag) {
    const seqId = this.journeys.find(tag);
    this.openJourney(seqId);
    return seqId !== null;
  }

  /** Show how a sequence went so far; null closes the drawing. */
  openJourney(seqId) {
    this.journey.show(seqId);
  }

  draw() {
    this.blocks.draw();
    this.tokens.draw();
    this.pool.draw();
    this.journey.draw();
  }

  #choose(seqId) {
    if (this.pool.chosen !== seqId) {
      this.pool.chosen = seqId;
      this.pool.draw();
    }
  }

  async #ask() {
    let pause = POLL_MS;
    this.#isAsking = true;
    try {
      const query = new URLSearchParams({ ...this.pool.query, since: this.#samples.at(-1)?.time_s ?? 0 });
      const seqId = this.pool.chosen ?? this.journey.seqId;
      if (seqId !== null) {
        query.set("sequence", seqId);
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
    this.pool.set(snapshot);
    this.sequences.set(snapshot, this.journeys);
    this.#showFigures(snapshot);
    this.draw();
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
    this.#showMean("ttft", oldest, snapshot);
    this.#showMean("itl", oldest, snapshot, "tpot");
  }

  /** The mean of the observations since the oldest sample; without any the last figure stays. */
  #showMean(name, oldest, newest, id = name) {
    const number = newest[name].count - oldest[name].count;
    if (number) {
      byId(id).textContent = duration((newest[name].sum_s - oldest[name].sum_s) / number);
    }
  }
}
