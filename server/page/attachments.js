// Files of text and pictures that go with a message: chosen, dropped or pasted, read in the browser, and shown as chips.

import { el, iconButton } from "./dom.js";
import { notify } from "./notices.js";

const MAX_BYTES = 256 * 1024; // of one file: more than the context of most models
const MAX_FILES = 8; // of one message
const MAX_SIDE = 2048; // pixels of a picture: more is more than most models see

const size = (bytes) => (bytes < 1024 ? `${bytes} bytes` : `${(bytes / 1024).toLocaleString("en-US", { maximumFractionDigits: 1 })} KB`);

/** Return a picture as { name, text: "", image }: an address that holds it, no larger than a model sees it. Throws a sentence. */
async function readPicture(name, file) {
  let picture;
  try {
    picture = await createImageBitmap(file); // upright, and of any format that this browser knows
  } catch {
    throw new Error(`${name} is no picture that this browser can read.`);
  }
  const scale = Math.min(1, MAX_SIDE / Math.max(picture.width, picture.height));
  const [width, height] = [picture.width, picture.height].map((side) => Math.max(1, Math.round(side * scale)));
  const canvas = el("canvas", { width, height });
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff"; // behind what is transparent
  context.fillRect(0, 0, width, height);
  context.drawImage(picture, 0, 0, width, height);
  picture.close();
  return { name, text: "", image: canvas.toDataURL("image/jpeg", 0.92) };
}

/** Return a file as { name, text }, a picture with its `image` if the model takes some. Throws a sentence. */
async function read(file, takesPictures) {
  const name = file.name.replace(/\s+/g, " ").slice(0, 200);
  if (takesPictures && file.type.startsWith("image/") && file.type !== "image/svg+xml") {
    return readPicture(name, file);
  }
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
export async function readAll(known, files, takesPictures) {
  const kept = [...known];
  for (const file of files) {
    try {
      if (kept.length >= MAX_FILES) {
        throw new Error(`A message takes at most ${MAX_FILES} files; ${file.name} is left out.`);
      }
      kept.push(await read(file, takesPictures));
    } catch (error) {
      notify(error.message, { isError: true });
    }
  }
  return kept;
}

/** Return a list of chips; `remove(file)` is called by their buttons, if there is one. */
export function chips(files, remove) {
  const made = files.map((file) => {
    const close = remove ? [iconButton(`Remove ${file.name}`, "close", () => remove(file))] : [];
    if (file.image?.startsWith("data:image/")) { // the page's policy loads no others
      return el("li", { className: "picture" }, el("img", { src: file.image, alt: file.name, title: file.name }), ...close);
    }
    const label = el("span", { textContent: file.name });
    const note = el("span", { className: "note", textContent: size(new Blob([file.text]).size) });
    return el("li", { className: "file", title: file.name }, label, note, ...close);
  });
  return el("ul", { className: "files", hidden: !files.length, attrs: { "aria-label": "Attached files" } }, ...made);
}
