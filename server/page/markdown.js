// Markdown as it streams: each line opens or continues blocks, as CommonMark's algorithm does, and DOM nodes are made
// once. Only the open block is drawn again, so an answer costs time linear in its length. There are headings, paragraphs,
// lists, quotes, fenced code, formulas, tables and rules. HTML is shown as text, and newlines are kept.

import { CodeBlock } from "./code.js";
import { el } from "./dom.js";
import { FormulaBlock } from "./formula.js";
import { Paragraph, Table, columnsOf } from "./leaves.js";

const MAX_DEPTH = 12; // containers deeper than this are shown as text
const MAX_WAIT = 200; // characters after which a line is what it looks like so far
const MARKS = /^(?:[-*+_=#:|\s>]|\d{1,9}[.)](?=\s))*(?:\d{1,9}[.)]?)?$/; // a line's start that may become several things
const FENCE_START = /^(?:[\s>]|[-*+]\s|\d{1,9}[.)]\s)*(?:`{1,2}$|~{1,2}$|`{3,}[^`]*$|~{3})/;
const FORMULA_START = /^(?:[\s>]|[-*+]\s|\d{1,9}[.)]\s)*(?:\$$|\\$|\$\$|\\\[)/; // a formula's block may begin
const CLOSING_START = /^[\s>]*[`~]*\s*$/;
const FENCE = /^(`{3,}|~{3,})\s*([^`\n]*)$/;
const MARKER = /^(?:([-*+])|(\d{1,9})([.)]))(?:\s{1,4}(?=\S)|\s|$)/;
const RULE = /^(?:(?:-\s*){3,}|(?:\*\s*){3,}|(?:_\s*){3,})$/;
const HEADING = /^(#{1,6})(?:\s+|$)/;
const CONTROLS = /[\u202a-\u202e\u2066-\u2069]/g; // they reorder the text around them

const indentOf = (line) => line.search(/\S|$/);

export class Markdown {
  #open = []; // open containers, outermost first: { element, kind, indent }; kind is ">" or a list's mark
  #leaf = null; // the open block of text, if any
  #leafDepth = 0; // how many containers it is in
  #pending = ""; // the start of a line that is not decided yet
  #isInLine = false; // the line is decided, and the rest of it belongs to the leaf

  constructor(element) {
    this.element = element;
    element.classList.add("markdown");
  }

  /** Take more text. */
  write(text) {
    const lines = text.replace(CONTROLS, "\ufffd").replaceAll("\r", "").split("\n");
    lines.forEach((part, index) => this.#part(part, index < lines.length - 1));
  }

  /** Draw the open block's new text. */
  render() {
    this.#leaf?.render();
  }

  /** The text is complete. */
  end() {
    if (this.#pending) {
      this.#part("", true);
    }
    this.#closeLeaf();
  }

  #part(part, isComplete) {
    if (this.#isInLine) {
      this.#leaf?.add(part);
    } else {
      this.#pending += part;
      if (!isComplete && this.#mustWait()) {
        return;
      }
      const line = this.#pending;
      this.#pending = "";
      const isCode = this.#leaf instanceof CodeBlock && !this.#open.length; // whose tabs are its own
      this.#line(isCode ? line : line.replace(/^\s+/, (start) => start.replaceAll("\t", "    ")), isComplete);
    }
    this.#isInLine = !isComplete;
  }

  /** Return whether the rest of the line may still decide what it is. */
  #mustWait() {
    const line = this.#pending;
    if (line.length <= FormulaBlock.MAX_LINE && (this.#leaf instanceof FormulaBlock || FORMULA_START.test(line))) {
      return !(this.#leaf instanceof CodeBlock) || this.#open.length > 0;
    }
    if (this.#leaf instanceof Table) {
      return line.length < MAX_WAIT || line.includes("|");
    }
    if (line.length > MAX_WAIT) {
      return false;
    }
    const isCode = this.#leaf instanceof CodeBlock;
    if (isCode && CLOSING_START.test(line)) {
      return true;
    }
    return !(isCode && !this.#open.length) && (MARKS.test(line) || FENCE_START.test(line)); // an item's code may end
  }

  /** Take a line's start, or all of it. */
  #line(line, isComplete) {
    const { matched, rest } = this.#match(line);
    const isInside = matched >= this.#leafDepth;
    if (this.#leaf instanceof CodeBlock && isInside) {
      this.#codeLine(rest);
      return;
    }
    if (this.#leaf instanceof FormulaBlock && isInside && rest.trim()) {
      this.#leaf.add(`\n${rest}`);
      if (this.#leaf.isComplete) {
        this.#closeLeaf();
      }
      return;
    }
    const text = rest.trimStart();
    if (!text) {
      this.#closeLeaf();
      this.#open.length = matched;
    } else if (this.#leaf instanceof Table && isInside && text.includes("|")) {
      this.#leaf.add(text);
    } else if (!this.#startsBlock(text) && this.#leaf instanceof Paragraph && this.#leaf.isLazy) {
      this.#continueParagraph(text, isComplete && isInside);
    } else {
      this.#blocks(rest, matched);
    }
  }

  /** Strip the marks of the containers that the line continues. */
  #match(line) {
    let rest = line;
    let matched = 0;
    for (const { indent, kind } of this.#open) {
      if (kind === ">") {
        const quote = /^ {0,3}> ?/.exec(rest);
        if (!quote) {
          break;
        }
        rest = rest.slice(quote[0].length);
      } else if (rest.trim()) {
        // Bullets two spaces under "1." are meant to be its own, though CommonMark wants three.
        const isMeant = /^ {2,}[-*+] /.test(rest) && !"-*+".includes(kind);
        const found = Math.min(indentOf(rest), indent);
        if (found < indent && !isMeant) {
          break;
        }
        rest = rest.slice(found);
      }
      matched += 1;
    }
    return { matched, rest };
  }

  #startsBlock(text) {
    const marker = MARKER.exec(text);
    const isItem = marker && (marker[1] || marker[2] === "1" || this.#open.length > 0);
    return isItem || FormulaBlock.isOpening(text) || text.startsWith(">") || HEADING.test(text) || FENCE.test(text) || RULE.test(text);
  }

  #continueParagraph(text, isComplete) {
    const columns = isComplete ? columnsOf(text) : 0;
    const header = columns && this.#leaf.takeHeader(columns);
    if (!header) {
      this.#leaf.add(`\n${text}`);
      return;
    }
    const paragraph = this.#leaf;
    this.#closeLeaf();
    if (!paragraph.text) {
      paragraph.element.remove();
    }
    this.#setLeaf(new Table(header, text));
  }

  #codeLine(rest) {
    const closing = /^\s*(`{3,}|~{3,})\s*$/.exec(rest);
    if (closing && closing[1].startsWith(this.#leaf.fence)) {
      this.#closeLeaf();
      return;
    }
    const strip = Math.min(indentOf(rest), this.#leaf.indent);
    this.#leaf.addLine(rest.slice(strip));
  }

  /** Open the containers that a line starts, then its leaf. */
  #blocks(line, matched) {
    this.#closeLeaf();
    let rest = line;
    let siblings = this.#open[matched]; // an item beside which another may begin
    this.#open.length = matched;
    for (;;) {
      const text = rest.trimStart();
      const marker = this.#open.length < MAX_DEPTH && !RULE.test(text) ? MARKER.exec(text) : null;
      if (this.#open.length < MAX_DEPTH && text.startsWith(">")) {
        this.#push(this.#top, { element: el("blockquote"), kind: ">" });
        rest = text.replace(/^> ?/, "");
      } else if (marker) {
        this.#item(marker, siblings, rest.length - text.length + marker[0].length);
        rest = text.slice(marker[0].length);
      } else {
        this.#openLeaf(text, rest.length - text.length);
        return;
      }
      siblings = undefined;
    }
  }

  #push(parent, container) {
    parent.append(container.element);
    this.#open.push(container);
  }

  get #top() {
    return this.#open.at(-1)?.element ?? this.element;
  }

  #item([, bullet, number, dot], siblings, indent) {
    const kind = bullet ?? dot;
    let list = siblings?.kind === kind ? siblings.element.parentElement : null;
    if (!list) {
      list = bullet ? el("ul") : el("ol", { start: Number(number) });
      this.#top.append(list);
    }
    this.#push(list, { element: el("li"), kind, indent });
  }

  #openLeaf(text, indent) {
    const fence = FENCE.exec(text);
    const heading = HEADING.exec(text);
    if (fence) {
      const language = fence[2].trim().split(/[\s{]/)[0].slice(0, 30);
      this.#setLeaf(new CodeBlock(language, { fence: fence[1], indent }));
    } else if (FormulaBlock.isOpening(text)) {
      this.#setLeaf(new FormulaBlock(text));
    } else if (RULE.test(text)) {
      this.#top.append(el("hr"));
    } else if (heading) {
      // The page itself uses headings down to the third level.
      this.#setLeaf(new Paragraph(`h${Math.min(heading[1].length + 3, 6)}`, `level-${heading[1].length}`));
      this.#leaf.add(text.slice(heading[0].length));
    } else if (text) {
      this.#setLeaf(new Paragraph("p"));
      this.#leaf.add(text);
    }
  }

  #setLeaf(leaf) {
    this.#top.append(leaf.element);
    this.#leaf = leaf;
    this.#leafDepth = this.#open.length;
  }

  #closeLeaf() {
    this.#leaf?.close();
    this.#leaf = null;
  }
}
