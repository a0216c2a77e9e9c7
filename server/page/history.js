// The last minute of the pool as two areas, one on the other: blocks that sequences hold, and the cached prefixes.

import { niceCeiling, prepare } from "./canvas.js";
import { count, themeColour } from "./dom.js";

const SPAN_S = 60;

export class History {
  #points = []; // { at, held, cached }, oldest first

  constructor(canvas, note) {
    this.canvas = canvas;
    this.note = note;
  }

  add({ time_s: at, blocks }) {
    if (at < this.#points.at(-1)?.at) {
      this.#points = []; // the daemon was restarted, and its clock with it
    }
    this.#points.push({ at, held: blocks.held, cached: blocks.cached });
    while (this.#points[1]?.at < at - SPAN_S) {
      this.#points.shift(); // one older point stays, so that the area begins at the edge
    }
  }

  draw() {
    const { context, width, height } = prepare(this.canvas);
    const points = this.#points;
    if (!points.length) {
      return;
    }
    const end = points.at(-1).at;
    const top = niceCeiling(Math.max(...points.map((point) => point.held + point.cached), 8));
    const x = (at) => width * (1 - (end - at) / SPAN_S);
    const y = (blocks) => height - 1 - ((height - 14) * blocks) / top;
    this.#grid(context, width, y, top);
    const { held, cached } = points.at(-1);
    this.#area(context, points.map((p) => [x(p.at), y(p.held + p.cached)]), height, "--cached", "--cached-line");
    this.#area(context, points.map((p) => [x(p.at), y(p.held)]), height, "--held", "--held-line");
    this.note.textContent = `${count(held)} held, ${count(cached)} cached`;
    this.canvas.setAttribute("aria-label", `Blocks in use over the last minute: now ${held} held, ${cached} cached`);
  }

  #grid(context, width, y, top) {
    context.strokeStyle = themeColour("--line");
    context.fillStyle = themeColour("--faint");
    context.font = "10px system-ui, sans-serif";
    context.lineWidth = 1;
    for (const level of [top / 2, top]) {
      const at = Math.round(y(level)) + 0.5;
      context.beginPath();
      context.moveTo(0, at);
      context.lineTo(width, at);
      context.stroke();
      context.fillText(count(level), 2, at - 3);
    }
  }

  /** Steps, not slopes: a block is held or it is not. */
  #area(context, corners, height, fill, line) {
    const outline = new Path2D();
    corners.forEach(([x, y], index) => {
      if (index) {
        outline.lineTo(x, corners[index - 1][1]);
        outline.lineTo(x, y);
      } else {
        outline.moveTo(x, y);
      }
    });
    const area = new Path2D(outline);
    area.lineTo(corners.at(-1)[0], height);
    area.lineTo(corners[0][0], height);
    context.fillStyle = themeColour(fill);
    context.fill(area);
    context.strokeStyle = themeColour(line);
    context.lineWidth = 1.5;
    context.stroke(outline);
  }
}
