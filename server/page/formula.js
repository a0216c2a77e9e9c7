// Formulas of LaTeX, drawn by KaTeX (katex/), which is loaded when the first one appears. Until then, and where KaTeX
// refuses a formula, its source is shown.

import { el } from "./dom.js";

const OPTIONS = { throwOnError: true, trust: false, strict: "ignore", maxSize: 20, maxExpand: 200 };
const MAX_DRAWN = 500; // formulas that are kept: a paragraph is drawn again and again while it grows
export const MAX_LENGTH = 2000; // characters of a formula
export const CLOSINGS = { "$$": /(?<!\\)\$\$/g, "$": /(?<!\\)\$/g, "\\[": /\\\]/g, "\\(": /\\\)/g };
const drawn = new Map(); // elements by their source
let katex = null; // once it is loaded
let loading = null; // a promise

async function load() {
  const styles = new Promise((onload, onerror) => {
    document.head.append(el("link", { rel: "stylesheet", href: "page/katex/katex.min.css", onload, onerror }));
  });
  await Promise.all([styles, import("./katex/katex.min.js")]);
  katex = globalThis.katex; // it is a script, which exports nothing
}

function draw(element, displayMode) {
  const source = element.textContent;
  if (!drawn.has(source)) {
    const made = el("span");
    const width = /^(?:\$(?!\$))/.test(source) ? 1 : 2; // of the marks
    try {
      katex.render(source.slice(width, -width), made, { ...OPTIONS, displayMode });
    } catch (error) {
      made.textContent = source;
      made.title = error.message;
    }
    drawn.set(source, made);
    if (drawn.size > MAX_DRAWN) {
      drawn.delete(drawn.keys().next().value);
    }
  }
  const copy = drawn.get(source).cloneNode(true);
  element.title = copy.title;
  element.replaceChildren(...copy.childNodes);
}

/** Draw the formula whose source, with its marks, is an element's text. */
export function drawFormula(element) {
  const isDisplay = /^(?:\$\$|\\\[)/.test(element.textContent);
  element.classList.toggle("display", isDisplay);
  element.dir = "ltr";
  if (katex) {
    draw(element, isDisplay);
  } else {
    loading ??= load();
    loading.then(() => draw(element, isDisplay), () => { loading = null; });
  }
}

/** A price is no formula: "$5 and $6" has a space before the second sign, "$5, $6" a digit after it. */
const isFormula = (tex, before, after) =>
  !/^\s|\s$|\n/.test(tex) && !/^[\p{L}\p{N}]/u.test(after) && !/[\p{L}\p{N}]/u.test(before) && !/^\d[^\\^_={}]*\s[a-z]{2}/i.test(tex);

/** Finds the formulas of one text, in time linear in its length. */
export class Formulas {
  #next = {}; // by opening mark: where its next closing mark begins

  constructor(text) {
    this.text = text;
  }

  /** Return where the formula ends whose mark ends at `start`: 0 if there is none, -1 if its end may follow. */
  find(mark, start) {
    const { text } = this;
    if (!(this.#next[mark] >= start)) {
      const closing = new RegExp(CLOSINGS[mark]);
      closing.lastIndex = start;
      this.#next[mark] = closing.exec(text)?.index ?? Infinity;
    }
    const at = this.#next[mark];
    if (at === Infinity || at - start > MAX_LENGTH) {
      return at === Infinity && mark !== "$" && text.length - start < MAX_LENGTH ? -1 : 0;
    }
    const tex = text.slice(start, at);
    const isText = !tex.trim() || (mark === "$" && !isFormula(tex, text[start - 2] ?? "", text.slice(at + 1, at + 3)));
    return isText ? 0 : at + mark.length;
  }
}
