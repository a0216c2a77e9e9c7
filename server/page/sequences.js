// The list of living sequences, a row each: state, length, blocks. The longest fills the bar, its prompt paler than its
// answer. Pointing at a row, or focusing it, chooses it.

import { count, el, sequenceColour } from "./dom.js";

const MAX_ROWS = 40;

function makeRow(seqId, choose) {
  const part = (className) => el("span", { className });
  const row = el("li", { tabIndex: 0 });
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
  row.append(parts.swatch, parts.state, parts.bar, parts.tokens, parts.blocks);
  for (const [event, chosen] of [["pointerenter", seqId], ["focus", seqId], ["pointerleave", null], ["blur", null]]) {
    row.addEventListener(event, () => choose(chosen));
  }
  return { row, ...parts };
}

export class Sequences {
  #rows = new Map(); // by sequence id: rows are kept, so that focus and pointer stay where they are

  constructor(list, note, choose) {
    this.list = list;
    this.note = note;
    this.choose = choose;
  }

  set({ sequences, requests }) {
    const shown = sequences.slice(0, MAX_ROWS);
    const living = new Set(shown.map((sequence) => sequence.seq_id));
    const longest = Math.max(...shown.map((sequence) => sequence.num_tokens));
    for (const [seqId, { row }] of this.#rows) {
      if (!living.has(seqId)) {
        if (row.matches(":hover, :focus")) {
          this.choose(null);
        }
        row.remove();
        this.#rows.delete(seqId);
      }
    }
    for (const sequence of shown) {
      this.#show(sequence, longest);
    }
    const total = requests.running + requests.waiting + requests.preempted;
    const part = total > shown.length ? `, ${shown.length} shown` : "";
    this.note.textContent = total ? count(total) + part : "none: the engine is idle";
  }

  #show(sequence, longest) {
    const id = sequence.seq_id;
    if (!this.#rows.has(id)) {
      this.#rows.set(id, makeRow(id, this.choose));
      this.list.append(this.#rows.get(id).row);
    }
    const { row, swatch, state, prompt, answer, tokens, blocks } = this.#rows.get(id);
    const isWaiting = ["waiting", "preempted"].includes(sequence.status);
    const numBlocks = sequence.block_runs.reduce((sum, [, length]) => sum + length, 0);
    const answered = sequence.num_tokens - sequence.num_prompt;
    row.classList.toggle("waiting", isWaiting);
    for (const part of [swatch, prompt, answer]) {
      part.style.background = sequenceColour(id);
    }
    const ofPrompt = Math.min(sequence.num_computed, sequence.num_prompt);
    prompt.style.width = `${(100 * ofPrompt) / longest}%`;
    answer.style.width = `${(100 * (sequence.num_computed - ofPrompt)) / longest}%`;
    state.textContent = sequence.status;
    tokens.textContent = `${count(sequence.num_prompt)} + ${count(answered)}`;
    tokens.title = `${sequence.num_prompt} prompt tokens (${sequence.num_cached} cached) + ${answered} generated`;
    blocks.textContent = `${count(numBlocks)} block${numBlocks === 1 ? "" : "s"}`;
  }
}
