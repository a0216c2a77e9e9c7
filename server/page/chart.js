// A chart of the last minute: stacked areas over time. Steps, not slopes: a block is held or it is not.

import { byId, count, svg } from "./dom.js";

const SPAN_S = 60;
const MIN_TOP = 8;

export class Chart {
  #points = []; // { at, values }, oldest first

  /** `names` of the series, from the bottom up, are their classes as well. */
  constructor(id, title, names) {
    Object.assign(this, { title, names, drawing: byId(id), note: byId(`${id}-note`), scale: byId(`${id}-scale`) });
    this.paths = names.map((name) => svg("path", { class: name }));
    this.drawing.append(...this.paths.toReversed());
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
    const top = niceCeiling(Math.max(MIN_TOP, ...this.#points.map((point) => sum(point.values))));
    const x = (point) => 100 * (1 - (at - point.at) / SPAN_S);
    const y = (point, number) => 100 * (1 - sum(point.values.slice(0, number)) / top);
    this.paths.forEach((path, index) => {
      const steps = this.#points.map((point, i) => `${i ? "H" : `M${x(point)},100H`}${x(point)}V${y(point, index + 1)}`);
      path.setAttribute("d", `${steps.join("")}V100`);
    });
    const now = this.names.map((name, index) => `${count(values[index])} ${name}`).join(", ");
    this.scale.textContent = count(top);
    this.note.textContent = now;
    this.drawing.setAttribute("aria-label", `${this.title} over the last minute: now ${now}`);
  }
}

const sum = (values) => values.reduce((total, value) => total + value, 0);

/** Return the smallest of 1, 2, 5, 10, 20, 50, ... that is at least `value`: a scale that rarely changes. */
function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}
