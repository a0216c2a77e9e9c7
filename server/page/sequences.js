// The list of sequences, a row each: state, length, blocks. Living ones come first, then the last that ended. The
// longest fills the bar, its prompt paler than its answer. Pointing at a row, or focusing it, chooses the sequence;
// a click opens its journey.

import { count, el, sequenceColour } from "./dom.js";

const MAX_ROWS = 40;
const MAX_ENDED = 8;

function makeRow(seqId, choose, open) {
  const part = (className) => el("span", { className });
  const button = el("button", { type: "button", className: "sequence", onclick: () => open(seqId) });
  const parts = {
    swatch: part("swatch"),
    state: part("state"),
    bar: part("bar"),
    prompt: part("prompt"),
    answer: part("answer"),
    tokens: part("tokens"),
    blocks: part("blocks"),
  };
  parts.bar.append(parts.prompt, parts.answer);
  button.append(parts.swatch, parts.state, parts.bar, parts.tokens, parts.blocks);
  for (const [event, chosen] of [["pointerenter", seqId], ["focus", seqId], ["pointerleave", null], ["blur", null]]) {
    button.addEventListener(event, () => choose(chosen));
  }
  return { row: el("li", {}, button), button, ...parts };
}

export class Sequences {
  #rows = new Map(); // by sequence id: rows are kept, so that focus and pointer stay where they are

  /** `choose(seqId or null)` and `open(seqId)` as in pool.js. */
  constructor(list, note, { choose, open }) {
    this.list = list;
    this.note = note;
    this.choose = choose;
    this.open = open;
  }

  /** Show a snapshot's sequences, and the last ones of `journeys` that ended. */
  set({ sequences, requests }, journeys) {
    const living = sequences.slice(0, MAX_ROWS);
    const ended = journeys.ended(MAX_ENDED).map(({ last }) => ({ ...last, status: "ended", num_blocks: 0 }));
    const shown = [...living, ...ended];
    const ids = new Set(shown.map((sequence) => sequence.seq_id));
    const longest = Math.max(...shown.map((sequence) => sequence.num_tokens));
    for (const [seqId, { row, button }] of this.#rows) {
      if (!ids.has(seqId)) {
        if (button.matches(":hover, :focus")) {
          this.choose(null);
        }
        row.remove();
        this.#rows.delete(seqId);
      }
    }
    shown.forEach((sequence, index) => this.#show(sequence, longest, index));
    const total = requests.running + requests.waiting + requests.preempted;
    const part = total > living.length ? `, ${living.length} shown` : "";
    this.note.textContent = total ? count(total) + part : "none: the engine is idle";
  }

  #show(sequence, longest, index) {
    const id = sequence.seq_id;
    if (!this.#rows.has(id)) {
      this.#rows.set(id, makeRow(id, this.choose, this.open));
    }
    const { row, button, swatch, state, prompt, answer, tokens, blocks } = this.#rows.get(id);
    if (this.list.children[index] !== row) {
      this.list.insertBefore(row, this.list.children[index] ?? null);
    }
    const answered = sequence.num_tokens - sequence.num_prompt;
    button.classList.toggle("waiting", ["waiting", "preempted"].includes(sequence.status));
    button.classList.toggle("ended", sequence.status === "ended");
    for (const part of [swatch, prompt, answer]) {
      part.style.background = sequenceColour(id);
    }
    const ofPrompt = Math.min(sequence.num_computed, sequence.num_prompt);
    prompt.style.width = `${(100 * ofPrompt) / longest}%`;
    answer.style.width = `${(100 * (sequence.num_computed - ofPrompt)) / longest}%`;
    state.textContent = sequence.status;
    tokens.textContent = `${count(sequence.num_prompt)} + ${count(answered)}`;
    button.title = `${sequence.num_prompt} prompt tokens (${sequence.num_cached} cached) + ${answered} generated; click for the journey`;
    blocks.textContent = `${count(sequence.num_blocks)} block${sequence.num_blocks === 1 ? "" : "s"}`;
  }
}
