// A block of code: its language, a button that copies it, and colours by highlight.js (highlight/), which is loaded when
// the first block appears.

import { copyButton, el } from "./dom.js";
import { sanitised } from "./sanitised.js";

const MAX_CHARS = 50_000; // longer code stays plain
let highlighter = null; // once it is loaded
let loading = null; // a promise

function colour(code, language) {
  const text = code.textContent;
  if (highlighter.getLanguage(language) && text.length <= MAX_CHARS) {
    code.replaceChildren(sanitised(highlighter.highlight(text, { language, ignoreIllegals: true }).value));
  }
}

/** Return an element. `isOpen`: the code goes on, and gets its colours when it is complete. */
export function codeBlock(language, text, isOpen = false) {
  const name = language || "code";
  const code = el("code", { textContent: text });
  const pre = el("pre", { tabIndex: 0, attrs: { "aria-label": `Code: ${name}` } }, code);
  if (language && !isOpen && highlighter) {
    colour(code, language);
  } else if (language && !isOpen) {
    loading ??= import("./highlight/highlight.min.js").then((module) => { highlighter = module.default; });
    loading.then(() => colour(code, language), () => { loading = null; });
  }
  const head = el("div", { className: "code-head" }, el("span", { textContent: name }), copyButton("Copy code", () => code.textContent, code));
  return el("div", { className: "code", dir: "ltr" }, head, pre);
}
