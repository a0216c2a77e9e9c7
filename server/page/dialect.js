// The Markdown that models write, as markdown-it reads it: CommonMark with tables and bare addresses, without HTML,
// indented code, underlined headings and reference links; with formulas, <br>, boxes of tasks, and images as links.

import "./markdown-it/markdown-it.umd.min.js";
import { CLOSINGS, Formulas, MAX_LENGTH } from "./formula.js";

const LINK = /^(?:https?:\/\/|mailto:)/i;
const md = globalThis.markdownit({ html: false, linkify: true });
md.disable(["code", "lheading", "reference"]);
md.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
md.validateLink = (address) => LINK.test(address);
md.normalizeLinkText = (address) => address;
export const { escapeHtml } = md.utils;

/** Return a text's tokens. `isOpen`: more will follow, so its last paragraph shows bold text and code before they close. */
export const parse = (text, isOpen) => md.parse(lenient(text), { isOpen });

/** Return tokens as HTML, which is to be sanitised. */
export const render = (tokens) => md.renderer.render(tokens, md.options, {});

/** Indent bullets that are two spaces under "1.": they are meant to be its own, though CommonMark wants three. */
function lenient(text) {
  let [fence, width, shift] = ["", 0, 0];
  return text.split("\n").map((line) => {
    const [mark] = /^(?:`{3,}|~{3,})/.exec(line) ?? [""];
    if (fence || mark) {
      fence = !fence ? mark : mark.startsWith(fence) && mark === line.trim() ? "" : fence;
      return line;
    }
    if (/^\S/.test(line)) {
      width = /^\d{1,9}[.)] +(?=\S)/.exec(line)?.[0].length ?? 0;
      shift = 0;
    } else if (/^ {2}[-*+] /.test(line)) {
      shift = Math.max(width - 2, 0);
    }
    return line.startsWith("  ") ? " ".repeat(shift) + line : line;
  }).join("\n");
}

// -- blocks -------------------------------------------------------------------------

/** A formula on lines of its own is a paragraph that ends with the closing mark, or like any other. */
md.block.ruler.before("fence", "formula", (state, start, end, silent) => {
  const lineAt = (line) => state.getLines(line, line + 1, state.blkIndent, false).trim();
  const mark = lineAt(start).slice(0, 2);
  const isClosed = (text) => text.search(CLOSINGS[mark]) >= 0;
  let text = lineAt(start);
  if ((mark !== "$$" && mark !== "\\[") || isClosed(text.slice(2))) {
    return false;
  }
  if (!silent) {
    let line = start + 1;
    for (let last = ""; line < end && !isClosed(last) && text.length < MAX_LENGTH; line += 1) {
      if (state.isEmpty(line) || state.sCount[line] < state.blkIndent) {
        break;
      }
      last = lineAt(line);
      text += `\n${last}`;
    }
    state.line = line;
    state.push("paragraph_open", "p", 1).map = [start, line];
    Object.assign(state.push("inline", "", 0), { content: text, map: [start, line], children: [] });
    state.push("paragraph_close", "p", -1);
  }
  return true;
}, { alt: ["paragraph", "blockquote", "list"] });

md.core.ruler.after("block", "answer", ({ tokens, env }) => {
  for (const token of tokens) {
    const { type } = token;
    token.hidden = false; // each item has its paragraph, so that a list's look does not change with its last item
    if (type === "heading_open" || type === "heading_close") {
      const level = Number(token.tag[1]); // the page itself uses headings down to the third level
      token.tag = `h${Math.min(level + 3, 6)}`;
      token.attrs = [["class", `level-${level}`]];
    } else if (type === "inline") {
      token.content = token.content.replace(/^\[([ xX])\] /, (_, mark) => (mark === " " ? "☐ " : "☑ "));
    } else if (token.attrGet("style")) {
      token.attrs = [["class", token.attrGet("style").replace("text-align:", "")]];
    }
    if (/^(?:paragraph|heading|td|th)_open$/.test(type)) {
      token.attrSet("dir", "auto");
    }
  }
  const last = tokens.findLast(({ nesting }) => nesting >= 0);
  if (env.isOpen && last?.type === "inline") {
    env.openText = last.content = last.content.trimEnd() + closings(last.content);
  }
});

/** Return the marks that close the code or the bold text with which a paragraph ends. */
function closings(text) {
  const parts = text.split(/(?<![`\\])`(?!`)/);
  if (parts.length % 2 === 0) {
    return "`";
  }
  const bold = parts.filter((_, index) => index % 2 === 0).join("").split("**");
  return bold.length % 2 === 0 && /^\S/.test(bold.at(-1)) ? "**" : "";
}

// -- inline -------------------------------------------------------------------------

md.inline.ruler.before("escape", "formula", (state, silent) => {
  const [mark] = /^(?:\$\$?|\\[([])/.exec(state.src.slice(state.pos, state.pos + 2)) ?? [];
  if (!mark) {
    return false;
  }
  state.formulas ??= new Formulas(state.src);
  const start = state.pos + mark.length;
  let end = state.formulas.find(mark, start);
  const isHalf = end < 0 && state.env.openText === state.src; // shown as it is until the formula is complete
  end = isHalf ? state.posMax : end;
  if (!end || end < 0 || end > state.posMax) {
    if (mark !== "$$") {
      return false;
    }
    end = start;
  }
  if (!silent) {
    const token = state.push(end === start || isHalf ? "text_special" : "formula", "", 0);
    token.content = state.src.slice(state.pos, end);
  }
  state.pos = end;
  return true;
});

md.inline.ruler.before("autolink", "br", (state, silent) => {
  const [tag] = /^<br\s{0,9}\/?>/i.exec(state.src.slice(state.pos, state.pos + 16)) ?? [""];
  if (tag && !silent) {
    state.push("br", "br", 0);
  }
  state.pos += tag.length;
  return tag !== "";
});

// -- HTML ---------------------------------------------------------------------------

Object.assign(md.renderer.rules, {
  hardbreak: () => "\n", // newlines are kept, so a <br> would be a second one
  formula: (tokens, index) => `<span class="formula">${escapeHtml(tokens[index].content)}</span>`,
  image: (tokens, index) => {
    const [address, text] = [tokens[index].attrGet("src"), tokens[index].content];
    return `<a href="${escapeHtml(address)}">Image: ${escapeHtml(text || address)}</a>`;
  },
  fence: (tokens, index) => {
    const { content, info } = tokens[index];
    const language = info.trim().split(/[\s{]/)[0].slice(0, 30);
    return `<pre title="${escapeHtml(language)}">${escapeHtml(`\n${content.replace(/\n$/, "")}`)}</pre>`; // HTML drops a first newline
  },
});
