// Markdown as it streams. A block or an item that another one follows is final; only the rest is read again, and of it
// only nodes that differ are replaced. So an answer costs time linear in its length, and what is selected or pressed stays.

import { codeBlock } from "./code.js";
import { parse, render } from "./dialect.js";
import { el } from "./dom.js";
import { drawFormula } from "./formula.js";
import { sanitised } from "./sanitised.js";

const SMALL = 3000; // characters and nodes that are made again whenever text is added
const NODE = 10; // characters that cost as much as a node
const CONTROLS = /[\u202a-\u202e\u2066-\u2069]/g; // they reorder the text around them
const UNDECIDED = /^[\s>]{0,99}(?:[-*+_=#|:~`$\\\s]{0,99}|\d{1,9}[.)]?\s?)$/; // a line's start that may become several things

export class Markdown {
  #text = ""; // from the first block or item on that is not final
  #final = null; // the last block before it
  #item = null; // the last item before it, where it is an item
  #numDrawn = 0; // characters of the text that were read as Markdown
  #cost = 0; // of reading them
  #tail = null; // a text node at their end, for what was added since
  #ending = null; // matches text that ends the last block

  constructor(element) {
    this.element = element;
    element.classList.add("markdown");
  }

  /** Take more text. */
  write(text) {
    this.#text += text.replace(CONTROLS, "\ufffd").replaceAll("\r", "");
  }

  /** Draw new text. A long block is read again when it ends or has grown by an eighth. */
  render() {
    const start = this.#text.lastIndexOf("\n") + 1;
    const text = UNDECIDED.test(this.#text.slice(start)) ? this.#text.slice(0, start) : this.#text;
    const isLong = this.#cost > SMALL && text.length < this.#numDrawn * 1.125;
    if (isLong && !this.#ending?.test(text.slice(this.#numDrawn - 4))) {
      const newline = text[this.#numDrawn - 1] === "\n" ? 1 : 0; // which a block's end does not show
      this.#tail?.replaceData(0, Infinity, text.slice(this.#numDrawn - newline));
    } else if (text.length !== this.#numDrawn) {
      this.#draw(text, true);
    }
  }

  /** The text is complete. */
  end() {
    this.#draw(this.#text, false);
  }

  #draw(text, isOpen) {
    const tokens = parse(text, isOpen);
    const leaf = tokens.findLast(({ nesting }) => nesting >= 0);
    const isInCode = isOpen && leaf?.type === "fence" && !isClosed(leaf);
    const made = finished(sanitised(render(tokens)), isInCode);
    this.#numDrawn = text.length;
    this.#cost = text.length + NODE * made.querySelectorAll("*").length;
    if (this.#item) {
      replace(this.#item.parentElement, made.firstChild, this.#item.nextSibling);
      made.firstChild.remove();
    }
    replace(this.element, made, this.#item ? this.#item.parentElement.nextSibling : this.#open);
    this.#follow(tokens.at(-1), isInCode ? leaf.markup : "");
    this.#settle(text.split("\n"), tokens);
  }

  /** The first block that is not final. */
  get #open() {
    return this.#final ? this.#final.nextSibling : this.element.firstChild;
  }

  /** Prepare for more text of the last block, if that is a paragraph or code. */
  #follow(last, fence) {
    const isParagraph = last?.type === "paragraph_close";
    const isCode = last?.type === "fence" && fence !== "";
    this.#ending = isParagraph ? /\n\s*\n/ : isCode ? new RegExp(`\\n {0,3}${fence}${fence[0]}*\\s*(?:\\n|$)`) : null;
    this.#tail = isParagraph || isCode ? document.createTextNode("") : null;
    if (this.#tail) {
      (isCode ? this.element.lastChild.querySelector("code") : this.element.lastChild).append(this.#tail);
    }
  }

  /** Keep the blocks and the items that no further text changes. */
  #settle(lines, tokens) {
    const blocks = tokens.filter(({ level, nesting }) => level === 0 && nesting >= 0);
    // Where no blank line precedes a block, its second line decides whether it is a table, or part of a paragraph.
    const isDecided = ({ map: [start] }) => lines[start - 1]?.trim() === "" || start + 2 < lines.length;
    const open = Math.max(blocks.findLastIndex(isDecided), 0);
    let start = blocks[open]?.map[0] ?? 0;
    for (const _ of blocks.slice(0, open)) {
      this.#final = this.#open;
      this.#item = null;
    }
    const items = open === blocks.length - 1 ? tokens.slice(tokens.indexOf(blocks[open])).filter(isItem) : [];
    // An item that is indented belongs to the first of its list; one with a bar could, by itself, begin a table.
    if (items.length > 1 && items.every(({ map: [at] }) => /^\S[^|]*$/.test(lines[at]))) {
      this.#item = this.#open.lastElementChild.previousElementSibling;
      start = items.at(-1).map[0];
    }
    const length = lines.slice(0, start).reduce((sum, line) => sum + line.length + 1, 0);
    this.#text = this.#text.slice(length);
    this.#numDrawn -= length;
  }
}

const isItem = ({ type, level }) => type === "list_item_open" && level === 1;

/** Return whether a block of code has its closing mark. */
const isClosed = ({ map: [start, end], content }) =>
  end - start === 2 + (content ? content.replace(/\n$/, "").split("\n").length : 0);

/** Return a fragment of blocks with what HTML does not say: heads of code, formulas, boxes in which tables scroll. */
function finished(fragment, isInCode) {
  const blanks = [...fragment.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE);
  blanks.forEach((node) => node.remove());
  const codes = [...fragment.querySelectorAll("pre")];
  for (const pre of codes) {
    pre.replaceWith(codeBlock(pre.title, pre.textContent, isInCode && pre === codes.at(-1)));
  }
  for (const table of fragment.querySelectorAll("table")) {
    const box = el("div", { className: "table", tabIndex: 0, attrs: { role: "group", "aria-label": "Table" } });
    table.replaceWith(box);
    box.append(table);
  }
  fragment.querySelectorAll(".formula").forEach(drawFormula);
  return fragment;
}

/** Replace the children of an element from `old` on by those of another node; equal ones stay. */
function replace(element, made, old = element.firstChild) {
  let [before, next] = [old, made.firstChild];
  while (before && next && before.isEqualNode(next)) {
    before = before.nextSibling;
    next.remove();
    next = made.firstChild;
  }
  if (before?.firstChild && next?.firstChild && before.cloneNode().isEqualNode(next.cloneNode())) {
    replace(before, next); // an element that has grown
    before = before.nextSibling;
    next.remove();
  }
  while (before) {
    const { nextSibling } = before;
    before.remove();
    before = nextSibling;
  }
  while (made.firstChild) {
    element.append(made.firstChild);
  }
}
