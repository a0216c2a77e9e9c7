// Colours for code, by what most languages have in common: comments, strings, numbers, keywords. No grammar of any one.

import { el } from "./dom.js";

const MAX_CHARS = 50_000; // longer code stays plain
const WORDS = new Set(
  ("abstract and as assert async await break case catch class const continue def default defer del do elif else end enum " +
    "except export extends false False finally fn for from func function if impl implements import in interface is " +
    "lambda let match mod module mut new nil None nonlocal not null or package pass private protected pub public raise " +
    "return self static struct super switch then this throw trait true True try type typeof undefined union unless until " +
    "use using var void where while with yield " +
    "SELECT FROM WHERE INSERT INTO VALUES UPDATE SET DELETE CREATE TABLE JOIN LEFT ON GROUP ORDER BY LIMIT AND OR NOT AS " +
    "int float double char bool boolean string str long echo fi done esac local").split(" "),
);
const HASH = new Set("python py sh bash shell zsh console yaml yml toml ruby rb r perl dockerfile makefile make ini".split(" "));
const PLAIN = new Set(["", "text", "txt", "plain", "plaintext", "markdown", "md", "output"]);
const STRING = /"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|`(?:[^`\\]|\\.)*`/.source;
const REST = /\b\d[\w.]*|[A-Za-z_$][\w$]*/.source;

/** Return nodes: strings and coloured spans, whose text is the code's. */
export function highlight(code, language) {
  const name = language.toLowerCase();
  if (PLAIN.has(name) || code.length > MAX_CHARS) {
    return [code];
  }
  const comment = HASH.has(name) ? /#[^\n]*/.source : /\/\*[^]*?\*\/|\/\/[^\n]*/.source + (name === "sql" ? "|--[^\\n]*" : "");
  const token = new RegExp(`(${comment})|("""[^]*?"""|${STRING})|(${REST})`, "g");
  const nodes = [];
  let at = 0;
  for (const found of code.matchAll(token)) {
    const kind = kindOf(found);
    if (kind) {
      nodes.push(code.slice(at, found.index), el("span", { className: kind, textContent: found[0] }));
      at = found.index + found[0].length;
    }
  }
  nodes.push(code.slice(at));
  return nodes.length < MAX_CHARS / 2 ? nodes : [code];
}

function kindOf([, comment, string, rest]) {
  if (comment || string) {
    return comment ? "hl-comment" : "hl-string";
  }
  return /^\d/.test(rest) ? "hl-number" : WORDS.has(rest) ? "hl-keyword" : "";
}
