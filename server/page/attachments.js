// Files of text that go with a message: chosen or dropped, read in the browser, and shown as chips.

import { el, iconButton } from "./dom.js";
import { notify } from "./notices.js";

const MAX_BYTES = 256 * 1024; // of one file: more than the context of most models
const MAX_FILES = 8; // of one message

const size = (bytes) => (bytes < 1024 ? `${bytes} bytes` : `${(bytes / 1024).toLocaleString("en-US", { maximumFractionDigits: 1 })} KB`);

/** Return a file's text as { name, text }. Throws a sentence. */
async function read(file) {
  const name = file.name.replace(/\s+/g, " ").slice(0, 200);
  if (file.size > MAX_BYTES) {
    throw new Error(`${name} has ${size(file.size)}; attach files of at most ${size(MAX_BYTES)}.`);
  }
  const bytes = new Uint8Array(await file.arrayBuffer());
  const isUtf16 = bytes[0] === 0xff && bytes[1] === 0xfe; // as spreadsheets export
  try {
    const text = new TextDecoder(isUtf16 ? "utf-16le" : "utf-8", { fatal: true }).decode(bytes).replaceAll("\r\n", "\n");
    if (!text.includes("\0")) {
      return { name, text };
    }
  } catch {
    // not of this encoding
  }
  throw new Error(`${name} is no text in UTF-8; attach plain text, code, Markdown, CSV or JSON.`);
}

/** Return the files of `known` and those of a FileList that could be read; the others are reported. */
export async function readAll(known, files) {
  const kept = [...known];
  for (const file of files) {
    try {
      if (kept.length >= MAX_FILES) {
        throw new Error(`A message takes at most ${MAX_FILES} files; ${file.name} is left out.`);
      }
      kept.push(await read(file));
    } catch (error) {
      notify(error.message, { isError: true });
    }
  }
  return kept;
}

/** Return a list of chips; `remove(file)` is called by their buttons, if there is one. */
export function chips(files, remove) {
  const made = files.map((file) => {
    const label = el("span", { textContent: file.name });
    const note = el("span", { className: "note", textContent: size(new Blob([file.text]).size) });
    const close = iconButton(`Remove ${file.name}`, "close", () => remove(file));
    return el("li", { className: "file", title: file.name }, label, note, ...(remove ? [close] : []));
  });
  return el("ul", { className: "files", hidden: !files.length, attrs: { "aria-label": "Attached files" } }, ...made);
}
