// Markdown within a paragraph, as DOM nodes: emphasis, code, links, struck text, formulas. Never markup from text, and
// linear in the text's length: openers are bounded in number, and a search that fails is not repeated.

import { el } from "./dom.js";
import { Formulas } from "./formula.js";

const MAX_OPENERS = 32; // deeper nesting is shown as the text it is
const PROTOCOLS = new Set(["http:", "https:", "mailto:"]);
const TAGS = { "*": "em", "_": "em", "**": "strong", "__": "strong", "~~": "del" };
// A formula's mark, an escape, backticks, marks of emphasis, brackets, an address in angle brackets, a bare address.
const TOKEN =
  /(\\\(|\\\[|\$\$?)|\\([!-/:-@[-`{-~])|(`+)|(\*+|_+|~~)|(!?\[)|(\])|<((?:https?|mailto):[^\s<>]{1,2000})>|(https?:\/\/[^\s<>"'`*[\]]{1,2000})/g;
const TARGET =
  /\(\s{0,9}<?([^\s<>()]{0,2000}(?:\([^\s<>()]{0,200}\)[^\s<>()]{0,200}){0,9})>?(?:\s{1,9}["'(][^\n]{0,300}?["')])?\s{0,9}\)/y;

/** Return an address that is safe to follow, or "". */
export function safeHref(text) {
  try {
    const url = new URL(text);
    return PROTOCOLS.has(url.protocol) ? url.href : "";
  } catch {
    return ""; // relative, or no address
  }
}

function link(href, children) {
  const anchor = el("a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" });
  return fill(anchor, children);
}

/** Append nodes one by one: a spread of very many would overflow the stack. */
function fill(parent, children) {
  for (const child of children) {
    parent.append(child);
  }
  return parent;
}

class InlineParser {
  #items = []; // strings and nodes, in order
  #openers = []; // { mark, index in #items }, innermost last
  #unclosed = new Set(); // lengths of backtick runs that no later run closes

  constructor(text, isOpen) {
    this.text = text;
    this.formulas = new Formulas(text);
    this.isOpen = isOpen; // more will follow: bold text and code are shown as such before they are closed
  }

  parse() {
    const token = new RegExp(TOKEN);
    let at = 0;
    for (let found = token.exec(this.text); found; found = token.exec(this.text)) {
      this.#push(this.text.slice(at, found.index));
      at = token.lastIndex = this.#take(found, found.index + found[0].length);
    }
    this.#push(this.text.slice(at));
    if (this.isOpen) {
      const bold = this.#openers.filter(({ mark }) => mark.length === 2 && mark in TAGS);
      bold.reverse().forEach((opener) => this.#wrap(opener));
    }
    return this.#items;
  }

  #push(item) {
    if (item !== "") {
      this.#items.push(item);
    }
  }

  /** Take a token that ends at `end`; return where to go on. */
  #take([all, formula, escaped, ticks, marks, opening, closing, quoted, bare], end) {
    if (formula) {
      return this.#formula(formula, end);
    } else if (escaped) {
      this.#push(escaped);
    } else if (ticks) {
      return this.#code(ticks, end);
    } else if (marks) {
      this.#emphasis(marks, end);
    } else if (opening) {
      this.#open(opening);
    } else if (closing) {
      return this.#label(end);
    } else {
      return this.#address(quoted, bare, all, end);
    }
    return end;
  }

  #open(mark) {
    if (this.#openers.length < MAX_OPENERS) {
      this.#openers.push({ mark, index: this.#items.length });
    }
    this.#items.push(mark);
  }

  /** Put everything after an opener into an element that replaces it; openers within stay text. */
  #wrap(opener, make = (children) => fill(document.createElement(TAGS[opener.mark]), children)) {
    const [, ...children] = this.#items.splice(opener.index);
    this.#items.push(make(children));
    this.#openers.length = this.#openers.indexOf(opener);
  }

  #formula(mark, start) {
    const { element, end = start } = this.formulas.find(mark, start) ?? {};
    if (element) {
      this.#push(element);
      return end;
    }
    const rest = end < 0 && this.isOpen ? this.text.slice(start) : ""; // shown as it is until the formula is complete
    this.#push((mark.startsWith("$") || rest ? mark : mark[1]) + rest);
    return start + rest.length;
  }

  #code(ticks, start) {
    const run = new RegExp(`(?<!\`)${ticks}(?!\`)`, "g");
    run.lastIndex = start;
    const closing = this.#unclosed.has(ticks.length) ? null : run.exec(this.text);
    if (!closing && !(this.isOpen && ticks.length === 1)) {
      this.#unclosed.add(ticks.length);
      this.#push(ticks);
      return start;
    }
    const end = closing ? closing.index : this.text.length;
    const inside = this.text.slice(start, end).replaceAll("\n", " ");
    const textContent = /^ .*[^ ].* $/.test(inside) ? inside.slice(1, -1) : inside;
    this.#push(el("code", { textContent }));
    return end + (closing ? ticks.length : 0);
  }

  #emphasis(marks, end) {
    const [before, after] = [this.text[end - marks.length - 1] ?? " ", this.text[end] ?? " "];
    const isWord = (character) => /[\p{L}\p{N}]/u.test(character);
    const isInWord = marks[0] === "_" && isWord(before) && isWord(after); // snake_case
    if (marks.length > 3 || isInWord) {
      this.#push(marks);
      return;
    }
    const canOpen = !/\s/.test(after) && !(marks[0] === "_" && isWord(before));
    const canClose = !/\s/.test(before) && !(marks[0] === "_" && isWord(after));
    const parts = marks.length === 3 ? [marks[0], marks.slice(1)] : [marks];
    for (const mark of canClose ? parts.toReversed() : parts) {
      const opener = canClose && this.#openers.findLast((each) => each.mark === mark);
      if (opener && opener.index < this.#items.length - 1) {
        this.#wrap(opener);
      } else if (canOpen) {
        this.#open(mark);
      } else {
        this.#push(mark);
      }
    }
  }

  /** The end of a label: a link if a target follows. An image becomes a link too, and is not fetched. */
  #label(end) {
    const opener = this.#openers.findLast(({ mark }) => mark === "[" || mark === "![");
    TARGET.lastIndex = end;
    const target = opener && TARGET.exec(this.text);
    const href = target ? safeHref(target[1]) : "";
    if (!href) {
      this.#push("]");
      return end;
    }
    const isImage = opener.mark === "![";
    this.#wrap(opener, (label) => link(href, isImage ? ["Image: ", ...(label.length ? label : [href])] : label));
    return TARGET.lastIndex;
  }

  #address(quoted, bare, all, end) {
    const text = quoted ?? bare.replace(/[.,;:!?)]{1,9}$/, ""); // a sentence's end is not the address's
    const href = safeHref(text);
    const isInLabel = this.#openers.some(({ mark }) => mark === "[");
    if (!href || (isInLabel && !quoted)) {
      this.#push(all);
      return end;
    }
    this.#push(link(href, [text]));
    return quoted ? end : end - (bare.length - text.length);
  }
}

/** Return the strings and nodes of a paragraph's text. `isOpen`: more text may follow. */
export function inlineNodes(text, isOpen = false) {
  return new InlineParser(text, isOpen).parse();
}

/** Replace an element's content by a paragraph's text. */
export function showInline(element, text, isOpen = false) {
  element.replaceChildren();
  fill(element, inlineNodes(text, isOpen));
}
