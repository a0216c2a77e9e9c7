// One sequence's way through the engine: a band of its phases, a curve of its computed positions, and a list of its
// events. The engine reports the times of arrival, admission, first token and end; the others are as exact as snapshots.

import { prepare } from "./canvas.js";
import { count, duration, el, sequenceColour, themeColour } from "./dom.js";

const BAND = 12; // CSS pixels
const MARGIN = 16; // above the curve, for the scale

export class JourneyView {
  #seqId = null;

  /** `parts` are the elements { figure, canvas, note, events, close }. */
  constructor(parts, journeys) {
    Object.assign(this, parts);
    this.journeys = journeys;
    this.close.addEventListener("click", () => this.show(null));
  }

  get seqId() {
    return this.#seqId;
  }

  /** Show a sequence's journey, or none for null. */
  show(seqId) {
    this.#seqId = this.journeys.get(seqId) ? seqId : null;
    this.figure.hidden = this.#seqId === null;
    this.draw();
    if (!this.figure.hidden) {
      this.figure.scrollIntoView({ block: "nearest" });
    }
  }

  draw() {
    const journey = this.journeys.get(this.#seqId);
    if (!journey?.last) {
      this.figure.hidden = true;
      return;
    }
    const { context, width, height } = prepare(this.canvas);
    const { last, samples, endS } = journey;
    const startS = last.arrival_s;
    const stopS = Math.max(endS ?? samples.at(-1).at, startS + 1e-3);
    const x = (at) => (width * (Math.min(Math.max(at, startS), stopS) - startS)) / (stopS - startS);
    this.#curve(context, journey, x, width, height);
    this.#band(context, journey, x, stopS, height);
    this.#write(journey, stopS);
  }

  #curve(context, { last, samples }, x, width, height) {
    const base = height - BAND - 4;
    const y = (tokens) => base - ((base - MARGIN) * tokens) / Math.max(last.num_tokens, 1);
    const corners = [[x(last.first_scheduled_s ?? samples.at(-1).at), y(0)]];
    const known = samples.map(({ at, computed }) => [at, computed]);
    if (last.first_token_s !== null) {
      known.push([last.first_token_s, last.num_prompt]);
    }
    known.sort(([a], [b]) => a - b);
    corners.push(...known.map(([at, computed]) => [x(at), y(computed)]), [width, y(samples.at(-1).computed)]);
    const outline = new Path2D();
    corners.forEach(([left, top], index) => (index ? outline.lineTo(left, top) : outline.moveTo(left, top)));
    const area = new Path2D(outline);
    area.lineTo(corners.at(-1)[0], base);
    area.lineTo(corners[0][0], base);
    context.fillStyle = context.strokeStyle = sequenceColour(last.seq_id);
    context.globalAlpha = 0.25;
    context.fill(area);
    context.globalAlpha = 1;
    context.lineWidth = 1.5;
    context.stroke(outline);
    this.#level(context, y(last.num_prompt), width, `prompt, ${count(last.num_prompt)} tokens`);
    if (last.num_cached && y(last.num_cached) - y(last.num_prompt) > 12) { // else the labels overlap
      this.#level(context, y(last.num_cached), width, `cached, ${count(last.num_cached)}`);
    }
  }

  #level(context, top, width, text) {
    context.strokeStyle = themeColour("--line");
    context.fillStyle = themeColour("--faint");
    context.lineWidth = 1;
    context.setLineDash([3, 3]);
    context.beginPath();
    context.moveTo(0, Math.round(top) + 0.5);
    context.lineTo(width, Math.round(top) + 0.5);
    context.stroke();
    context.setLineDash([]);
    context.font = "10px system-ui, sans-serif";
    context.fillText(text, 2, top - 3);
  }

  /** Waiting, prefill, decoding and preemption as lengths of one band. */
  #band(context, { last, samples }, x, stopS, height) {
    const colour = sequenceColour(last.seq_id);
    const scheduledS = last.first_scheduled_s ?? stopS;
    const tokenS = last.first_token_s ?? stopS;
    const paint = (from, to, fill, alpha) => {
      context.globalAlpha = alpha;
      context.fillStyle = fill;
      context.fillRect(x(from), height - BAND, Math.max(x(to) - x(from), 0), BAND);
      context.globalAlpha = 1;
    };
    paint(last.arrival_s, scheduledS, themeColour("--cached-block"), 1);
    paint(scheduledS, tokenS, colour, 0.45);
    paint(tokenS, stopS, colour, 1);
    samples.forEach(({ at, status }, index) => {
      if (status === "preempted") {
        paint(at, samples[index + 1]?.at ?? stopS, themeColour("--danger"), 1);
      }
    });
  }

  #write({ last, events, endS, isExact, peakBlocks }, stopS) {
    const since = (at) => duration(Math.max(at - last.arrival_s, 0));
    const steps = [["0 ms", "arrived"]];
    if (last.first_scheduled_s !== null) {
      const cached = last.num_cached ? `, ${count(last.num_cached)} of them cached` : "";
      steps.push([since(last.first_scheduled_s), `admitted with ${count(last.num_prompt)} prompt tokens${cached}`]);
    }
    if (last.first_token_s !== null) {
      const prefill = duration(last.first_token_s - last.first_scheduled_s);
      steps.push([since(last.first_token_s), `first token, after ${prefill} of prefill`]);
    }
    steps.push(...events.map(({ at, name }) => [`~${since(at)}`, name]));
    const answered = last.num_tokens - last.num_prompt;
    const pace = last.first_token_s !== null && answered > 1
      ? `, ${duration((stopS - last.first_token_s) / (answered - 1))} each` : "";
    const state = endS === null ? last.status : "ended";
    const how = last.finish ? ` (${last.finish})` : "";
    steps.push([`${endS === null || isExact ? "" : "~"}${since(stopS)}`, `${state}: ${count(answered)} tokens${pace}${how}`]);
    const rows = steps.map(([at, text]) => el("li", {}, el("span", { textContent: at }), text));
    this.events.replaceChildren(...rows);
    this.note.textContent = `sequence ${last.seq_id} of request ${last.tag}…, at most ${count(peakBlocks)} blocks`;
    this.canvas.setAttribute("aria-label", `Journey of sequence ${last.seq_id}: the events are listed below`);
  }
}
