// What the other modules need of the DOM: making elements, and writing numbers for people.

/** Return an element with properties (className, onclick, ...), attributes under `attrs`, and children. */
export function el(tag, { attrs = {}, ...properties } = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  for (const [name, value] of Object.entries(attrs)) {
    element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Return an element of SVG with attributes and children. */
export function svg(tag, attrs, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  Object.entries(attrs).forEach(([name, value]) => element.setAttribute(name, value));
  element.append(...children);
  return element;
}

/** Return a drawing of index.html's sprite; screen readers skip it. */
export const icon = (name) => svg("svg", { class: "icon", "aria-hidden": "true" }, svg("use", { href: `#icon-${name}` }));

/** Return a button. One with an icon shows `label` as a tooltip; one without shows it as its text. */
export function button(label, { icon: name = "", ...properties } = {}) {
  const shown = name ? { title: label, attrs: { "aria-label": label } } : { textContent: label };
  const made = el("button", { type: "button", ...shown, ...properties });
  if (name) {
    made.append(icon(name));
  }
  return made;
}

export const iconButton = (label, name, onclick) => button(label, { icon: name, className: "icon-button", onclick });

/** Return a button that copies what `text()` returns, and else selects an element. */
export function copyButton(label, text, element) {
  const made = iconButton(label, "copy", () => copyText(text(), made, element));
  return made;
}

export const byId = (id) => document.getElementById(id);

/** Call `act` in place of a form's submission. */
export function onSubmit(form, act) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    act();
  });
}

/** Return the object that this browser keeps under a key. */
export function recall(key) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? {};
  } catch {
    return {};
  }
}

export function remember(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
  } catch {
    // no room, or no storage
  }
}

/** Copy a text and show on the button that it was copied. Pages over plain HTTP get no clipboard: select instead. */
async function copyText(text, copier, element) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    if (!copyBySelection(text)) {
      getSelection().selectAllChildren(element);
      return;
    }
  }
  copier.dataset.state = "done";
  setTimeout(() => delete copier.dataset.state, 1500);
}

function copyBySelection(text) {
  const area = el("textarea", { value: text, className: "unseen", readOnly: true });
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return isCopied;
}

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

/** The key of an event, or nothing if it belongs to the composition of a character; Safari gives the Enter that ends one key code 229. */
export const keyOf = (event) => (event.isComposing || event.keyCode === 229 ? "" : event.key);

/** 12345 -> "12,345"; a dash for what is not known. */
export const count = (value) => (Number.isFinite(value) ? Math.round(value).toLocaleString("en-US") : "–");

/** Return the colour of a sequence: neighbours in time are far apart on the colour wheel (the golden angle). */
export function sequenceColour(seqId) {
  const [lightness, chroma] = document.documentElement.dataset.theme === "dark" ? [0.76, 0.12] : [0.62, 0.14];
  return `oklch(${lightness} ${chroma} ${(seqId * 137.508 + 150) % 360})`;
}

/** Return a colour of the style sheet in the theme that is on, for drawing on `canvas`. */
export function themeColour(canvas, name) {
  canvas.style.color = `var(${name})`;
  return getComputedStyle(canvas).color;
}
