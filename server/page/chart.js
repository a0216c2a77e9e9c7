// A chart of the last minute: stacked areas over time, in steps.

import { niceCeiling, prepare } from "./canvas.js";
import { count, themeColour } from "./dom.js";

const SPAN_S = 60;

export class Chart {
  #points = []; // { at, values }, oldest first

  /** `series` are { name, fill, line } from the bottom up, colours as custom properties. */
  constructor(canvas, note, title, series) {
    this.canvas = canvas;
    this.note = note;
    this.title = title;
    this.series = series;
  }

  /** Add one value for each series, at a time in seconds. */
  add(at, values) {
    if (at < this.#points.at(-1)?.at) {
      this.#points = []; // the daemon was restarted, and its clock with it
    }
    this.#points.push({ at, values });
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
    const top = niceCeiling(Math.max(...points.map(({ values }) => sum(values)), 8));
    const x = (at) => width * (1 - (end - at) / SPAN_S);
    const y = (value) => height - 1 - ((height - 14) * value) / top;
    this.#grid(context, width, y, top);
    for (let number = this.series.length; number > 0; number -= 1) {
      const { fill, line } = this.series[number - 1];
      const corners = points.map((point) => [x(point.at), y(sum(point.values.slice(0, number)))]);
      this.#area(context, corners, height, themeColour(fill), themeColour(line));
    }
    const now = this.series.map(({ name }, index) => `${count(points.at(-1).values[index])} ${name}`).join(", ");
    this.note.textContent = now;
    this.canvas.setAttribute("aria-label", `${this.title} over the last minute: now ${now}`);
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
    context.fillStyle = fill;
    context.fill(area);
    context.strokeStyle = line;
    context.lineWidth = 1.5;
    context.stroke(outline);
  }
}

const sum = (values) => values.reduce((total, value) => total + value, 0);
