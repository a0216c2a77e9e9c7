// The list of sequences, a row each: state, length, blocks. Living ones come first, then the last that ended. The
// longest fills the bar, its prompt paler than its answer. Pointing at a row, or focusing it, chooses the sequence;
// a click opens its journey.

import { count, el, sequenceColour } from "./dom.js";

const MAX_ROWS = 40;
const MAX_ENDED = 8;

export class Sequences {
  #rows = new Map(); // by sequence id: rows are kept, so that focus and pointer stay where they are

  /** `choose(seqId or null)` and `open(seqId)` as in pool.js. */
  constructor(list, note, { choose, open }) {
    Object.assign(this, { list, note, choose, open });
  }

  /** Show a snapshot's sequences, and the last ones of `journeys` that ended. */
  show({ sequences, requests }, journeys) {
    const living = sequences.slice(0, MAX_ROWS);
    const shown = [...living, ...journeys.ended(MAX_ENDED).map((last) => ({ ...last, status: "ended", num_blocks: 0 }))];
    const ids = new Set(shown.map((sequence) => sequence.seq_id));
    for (const [seqId, { row, button }] of this.#rows) {
      if (!ids.has(seqId)) {
        if (button.matches(":hover, :focus")) {
          this.choose(null);
        }
        row.remove();
        this.#rows.delete(seqId);
      }
    }
    const longest = Math.max(...shown.map((sequence) => sequence.num_tokens));
    shown.forEach((sequence, index) => this.#show(sequence, longest, index));
    const total = requests.running + requests.waiting + requests.preempted;
    const part = total > living.length ? `, ${living.length} shown` : "";
    this.note.textContent = total ? count(total) + part : "none: the engine is idle";
  }

  #make(seqId) {
    const [swatch, state, bar, tokens, blocks, prompt, answer] =
      ["swatch", "state", "bar", "tokens", "blocks", "prompt", "answer"].map((className) => el("span", { className }));
    bar.append(prompt, answer);
    const button = el("button", { type: "button", onclick: () => this.open(seqId) }, swatch, state, bar, tokens, blocks);
    for (const [event, chosen] of [["pointerenter", seqId], ["focus", seqId], ["pointerleave", null], ["blur", null]]) {
      button.addEventListener(event, () => this.choose(chosen));
    }
    return { row: el("li", {}, button), button, state, tokens, blocks, prompt, answer };
  }

  #show(sequence, longest, index) {
    const { seq_id: id, status, num_prompt: prompt, num_cached: cached } = sequence;
    const parts = this.#rows.get(id) ?? this.#make(id);
    this.#rows.set(id, parts);
    if (this.list.children[index] !== parts.row) {
      this.list.insertBefore(parts.row, this.list.children[index] ?? null);
    }
    const answered = sequence.num_tokens - prompt;
    const ofPrompt = Math.min(sequence.num_computed, prompt);
    parts.button.className = `sequence ${status}`;
    parts.button.style.setProperty("--own", sequenceColour(id));
    parts.button.title = `${prompt} prompt tokens (${cached} cached) + ${answered} generated; click for the journey`;
    parts.prompt.style.width = `${(100 * ofPrompt) / longest}%`;
    parts.answer.style.width = `${(100 * (sequence.num_computed - ofPrompt)) / longest}%`;
    parts.state.textContent = status;
    parts.tokens.textContent = `${count(prompt)} + ${count(answered)}`;
    parts.blocks.textContent = `${count(sequence.num_blocks)} block${sequence.num_blocks === 1 ? "" : "s"}`;
  }
}
