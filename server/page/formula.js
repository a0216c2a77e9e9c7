// Formulas of LaTeX, drawn by KaTeX (katex/), which is loaded when the first one appears. Until then, and where KaTeX
// refuses a formula, its source is shown.

import { el } from "./dom.js";

const OPTIONS = { throwOnError: true, trust: false, strict: "ignore", maxSize: 20, maxExpand: 200 };
const MAX_LENGTH = 2000; // characters of a formula
const MAX_DRAWN = 500; // formulas that are kept: a paragraph is drawn again and again while it grows
const CLOSINGS = { "$$": /(?<!\\)\$\$/g, "$": /(?<!\\)\$/g, "\\[": /\\\]/g, "\\(": /\\\)/g };
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

function draw(element, tex, displayMode) {
  const source = element.textContent;
  if (!drawn.has(source)) {
    const made = el("span");
    try {
      katex.render(tex, made, { ...OPTIONS, displayMode });
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

/** Return an element with a formula, whose source has delimiters. */
function formula(source, mark) {
  const isDisplay = mark === "$$" || mark === "\\[";
  const element = el("span", { className: isDisplay ? "formula display" : "formula", textContent: source, dir: "ltr" });
  const tex = source.slice(mark.length, -mark.length);
  if (katex) {
    draw(element, tex, isDisplay);
  } else {
    loading ??= load();
    loading.then(() => draw(element, tex, isDisplay), () => { loading = null; });
  }
  return element;
}

/** A price is no formula: "$5 and $6" has a space before the second sign, "$5, $6" a digit after it. */
const isFormula = (tex, after) =>
  !/^\s|\s$|\n/.test(tex) && !/^[\p{L}\p{N}]/u.test(after) && !/^\d[^\\^_={}]*\s[a-z]{2}/i.test(tex);

/** Finds the formulas of one text, in order, in time linear in its length. */
export class Formulas {
  #next = {}; // by opening mark: where its next closing mark begins

  constructor(text) {
    this.text = text;
  }

  /** Return { element, end } of the formula whose mark ends at `start`, or null. `end` is -1 if its close may follow. */
  find(mark, start) {
    const { text } = this;
    if (!(this.#next[mark] >= start)) {
      const closing = new RegExp(CLOSINGS[mark]);
      closing.lastIndex = start;
      this.#next[mark] = closing.exec(text)?.index ?? Infinity;
    }
    const at = this.#next[mark];
    const tex = text.slice(start, Math.min(at, start + MAX_LENGTH));
    if (!Number.isFinite(at) && mark !== "$" && text.length - start < MAX_LENGTH) {
      return { end: -1 };
    }
    const before = text[start - 2] ?? "";
    const isText = at - start > MAX_LENGTH || !tex.trim() || (mark === "$" && (!isFormula(tex, text.slice(at + 1, at + 3)) || /[\p{L}\p{N}]/u.test(before)));
    return isText ? null : { element: formula(mark + tex + text.slice(at, at + mark.length), mark), end: at + mark.length };
  }
}

/** A formula on lines of its own. It ends with its closing mark; a blank line before that makes it text. */
export class FormulaBlock {
  static MAX_LINE = MAX_LENGTH; // longer ones are text

  /** Return whether a line opens a block: it begins with a mark and does not close it. */
  static isOpening(text) {
    const mark = text.slice(0, 2);
    return (mark === "$$" || mark === "\\[") && text.length <= MAX_LENGTH && text.slice(2).search(CLOSINGS[mark]) < 0;
  }

  constructor(text) {
    this.mark = text.slice(0, 2);
    this.text = text;
    this.element = el("p", { className: "formula source" });
  }

  add(text) {
    this.text += text;
  }

  get isComplete() {
    return this.text.length > MAX_LENGTH || this.text.slice(2).search(CLOSINGS[this.mark]) >= 0;
  }

  render() {
    this.element.textContent = this.text;
  }

  close() {
    const at = 2 + this.text.slice(2).search(CLOSINGS[this.mark]);
    const isShort = at >= 2 && at <= MAX_LENGTH;
    this.element.className = isShort ? "" : "source";
    this.element.replaceChildren(...(isShort ? [formula(this.text.slice(0, at + 2), this.mark), this.text.slice(at + 2)] : [this.text]));
  }
}
