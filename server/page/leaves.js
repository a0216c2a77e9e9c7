// Blocks of Markdown that hold text: paragraphs (and headings), tables.

import { el } from "./dom.js";
import { inlineNodes, showInline } from "./inline.js";

const SMALL = 2000; // characters that are drawn again whenever some are added
const MAX_COLUMNS = 64;
const DELIMITER = /^\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*){0,64}\|?\s*$/;

export class Paragraph {
  text = "";
  #formatted = 0; // characters that were drawn as Markdown
  #drawn = 0;
  #tail = null; // a text node with the characters after those

  constructor(tag, className = "") {
    this.element = el(tag, { className, dir: "auto" });
    this.isLazy = tag === "p"; // a line without its containers' marks may continue it
  }

  add(text) {
    this.text += text;
  }

  /** Draw new text. That of a long paragraph stays plain until it has grown by a sixteenth, so the cost is linear. */
  render() {
    const { length } = this.text;
    if (length > SMALL && length < this.#formatted * 1.0625) {
      this.#tail.appendData(this.text.slice(this.#drawn));
    } else if (length !== this.#formatted) {
      showInline(this.element, marked(this.text), true);
      this.#tail = document.createTextNode("");
      this.element.append(this.#tail);
      this.#formatted = length;
    }
    this.#drawn = length;
  }

  close() {
    showInline(this.element, marked(this.isLazy ? this.text : this.text.replace(/\s#+\s*$/, "")));
  }

  /** Cut the last line off and return its cells, if there are as many as columns. */
  takeHeader(columns) {
    const start = this.text.lastIndexOf("\n") + 1;
    const header = cells(this.text.slice(start));
    if (header.length !== columns) {
      return null;
    }
    this.text = this.text.slice(0, Math.max(start - 1, 0));
    return header;
  }
}

/** The boxes of a list of tasks. */
const marked = (text) => text.replace(/^\[([ xX])\] /, (_, mark) => (mark === " " ? "☐ " : "☑ "));

const cells = (line) => {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/, MAX_COLUMNS).map((cell) => cell.trim().replaceAll("\\|", "|"));
};

/** Return how many columns the line under a table's header has, 0 for any other line. */
export const columnsOf = (line) => (line.includes("|") && DELIMITER.test(line) ? cells(line).length : 0);

export class Table {
  #rows = []; // complete, and not drawn yet

  constructor(header, delimiter) {
    this.alignments = cells(delimiter).map((cell) => {
      const [left, right] = [cell.startsWith(":"), cell.endsWith(":")];
      return right ? (left ? "center" : "right") : "";
    });
    this.body = el("tbody");
    const head = el("thead", {}, this.#row(header, "th"));
    const attrs = { role: "group", "aria-label": "Table" };
    this.element = el("div", { className: "table", tabIndex: 0, attrs }, el("table", {}, head, this.body));
  }

  add(line) {
    this.#rows.push(this.#row(cells(line), "td"));
  }

  /** Draw new rows: one by one at first, then when there are a sixteenth more, for each lays out the whole table. */
  render() {
    if (this.#rows.length > this.body.rows.length / 16) {
      this.close();
    }
  }

  close() {
    this.#rows.forEach((row) => this.body.append(row));
    this.#rows = [];
  }

  #row(texts, tag) {
    const row = el("tr");
    this.alignments.forEach((className, column) => {
      const cell = el(tag, { className, dir: "auto" });
      (texts[column] ?? "").split(/<br\s{0,9}\/?>/i).forEach((line, index) => {
        cell.append(...(index ? [el("br")] : []), ...inlineNodes(line));
      });
      row.append(cell);
    });
    return row;
  }
}
