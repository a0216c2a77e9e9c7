// The live view: polls the engine's state while the page is visible, and updates the figures and drawings.

import { getJson } from "./api.js";
import { byId, count, duration } from "./dom.js";
import { History } from "./history.js";
import { Pool } from "./pool.js";
import { Sequences } from "./sequences.js";

const POLL_MS = 200;
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
    this.history = new History(byId("history"), byId("history-note"));
    this.pool = new Pool(byId("pool"), byId("pool-note"));
    this.sequences = new Sequences(byId("sequences"), byId("sequences-note"), (seqId) => {
      this.pool.chosen = seqId;
      this.pool.draw();
    });
    const redraw = () => this.draw();
    document.addEventListener("themechange", redraw);
    new ResizeObserver(redraw).observe(this.pool.canvas);
    document.addEventListener("visibilitychange", () => this.start());
  }

  /** Ask now and again and again; a hidden page asks nothing. */
  start() {
    clearTimeout(this.#timer);
    if (!document.hidden && !this.#isAsking) {
      this.#ask();
    }
  }

  draw() {
    this.history.draw();
    this.pool.draw();
  }

  async #ask() {
    let pause = POLL_MS;
    this.#isAsking = true;
    try {
      this.#show(await getJson("v1/engine/live"));
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
    this.history.add(snapshot);
    this.pool.set(snapshot);
    this.sequences.set(snapshot);
    this.draw();
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
    this.#showMean("ttft", oldest, snapshot);
    this.#showMean("itl", oldest, snapshot, "tpot");
  }

  /** The mean of what was observed since the oldest sample; what nothing was added to stays as it is. */
  #showMean(name, oldest, newest, id = name) {
    const number = newest[name].count - oldest[name].count;
    if (number) {
      byId(id).textContent = duration((newest[name].sum_s - oldest[name].sum_s) / number);
    }
  }
}
