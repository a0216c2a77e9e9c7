// The little that the other modules need of the DOM: making elements, and writing numbers for people.
// Text enters the page through textContent alone, so nothing that a model says is ever markup.

/** An element with properties (className, textContent, onclick, ...), attributes under `attrs`, and children. */
export function el(tag, { attrs = {}, ...properties } = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  for (const [name, value] of Object.entries(attrs)) {
    element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export const byId = (id) => document.getElementById(id);

/** 0.0123 -> "12.3 ms", 1.5 -> "1.50 s"; a dash for what is not known. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) {
    return "–";
  }
  if (seconds >= 1) {
    return `${seconds.toFixed(2)} s`;
  }
  const ms = seconds * 1000;
  return `${ms.toFixed(ms < 100 ? 1 : 0)} ms`;
}

/** 12345 -> "12,345"; a dash for what is not known. */
export const count = (value) => (Number.isFinite(value) ? Math.round(value).toLocaleString("en-US") : "–");

/** The colour of a sequence: neighbours in time are far apart on the colour wheel (the golden angle). */
export function sequenceColour(seqId) {
  const [lightness, chroma] = document.documentElement.dataset.theme === "dark" ? [0.76, 0.12] : [0.62, 0.14];
  return `oklch(${lightness} ${chroma} ${(seqId * 137.508 + 150) % 360})`;
}

/** A custom property of the style sheet, for what is drawn on a canvas. */
export const themeColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
