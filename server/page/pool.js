// The KV pool, a cell a block, in physical order. A block wears the colour of the sequence whose page table names it
// and fills up as positions are computed; one that several share is ringed. A chosen sequence's page table is drawn
// over the pool as a line from its first logical block to its last.

import { prepare } from "./canvas.js";
import { count, sequenceColour, themeColour } from "./dom.js";

const MAX_CELL = 18; // CSS pixels
const MIN_CELL = 1;

/** [[first, length], ...] -> every block, in order. */
export function* blocksOf(runs) {
  for (const [first, length] of runs) {
    for (let block = first; block < first + length; block += 1) {
      yield block;
    }
  }
}

/** The largest square cell with which `needed` blocks fit the box, and how many of them do. */
export function layout(needed, width, height) {
  const columns = (cell) => Math.max(Math.floor(width / cell), 1);
  const capacity = (cell) => columns(cell) * Math.max(Math.floor(height / cell), 1);
  let cell = MAX_CELL;
  while (cell > MIN_CELL && capacity(cell) < needed) {
    cell -= cell > 8 ? 1 : 0.5;
  }
  return { cell, columns: columns(cell), shown: capacity(cell) };
}

export class Pool {
  #snapshot = null;
  #needed = 1; // blocks to be shown at least
  chosen = null; // a sequence id

  constructor(canvas, note) {
    this.canvas = canvas;
    this.note = note;
  }

  set(snapshot) {
    this.#snapshot = snapshot;
    const ends = [...snapshot.sequences.flatMap((sequence) => sequence.block_runs), ...snapshot.cached_runs];
    const highest = Math.max(0, ...ends.map(([first, length]) => first + length));
    // Only the part of the pool that has been used, for a few blocks of thousands would be a speck. It grows in powers
    // of two, so that the picture seldom changes its scale.
    while (this.#needed < highest) {
      this.#needed *= 2;
    }
  }

  draw() {
    const { context, width, height } = prepare(this.canvas);
    if (!this.#snapshot) {
      return;
    }
    const { num_blocks: total, block_size: size, sequences, cached_runs: cached } = this.#snapshot;
    const { cell, columns, shown: fitting } = layout(Math.min(this.#needed, total), width, height);
    const shown = Math.min(fitting, total);
    const gap = cell >= 5 ? Math.max(1, Math.round(cell / 9)) : 0;
    const grid = { cell, gap, place: (block) => [(block % columns) * cell, Math.floor(block / columns) * cell] };
    this.#paintAll(context, grid, blocksOf([[0, shown]]), "--free");
    this.#paintAll(context, grid, blocksOf(cached), "--cached-block");
    this.#paintHeld(context, grid, sequences, size);
    const chosen = sequences.find((sequence) => sequence.seq_id === this.chosen);
    if (chosen) {
      this.#trace(context, grid, [...blocksOf(chosen.block_runs)]);
    }
    const part = shown < total ? `first ${count(shown)} of ${count(total)} blocks` : `${count(total)} blocks`;
    this.note.textContent = `${part}, ${size} tokens each`;
    const { held } = this.#snapshot.blocks;
    const holders = sequences.filter((sequence) => sequence.block_runs.length).length;
    this.canvas.setAttribute("aria-label", `The pool: ${held} of ${total} blocks held by ${holders} sequences`);
  }

  #paintAll(context, { cell, gap, place }, blocks, colour) {
    context.fillStyle = themeColour(colour);
    for (const block of blocks) {
      const [x, y] = place(block);
      context.fillRect(x, y, cell - gap, cell - gap);
    }
  }

  #paintHeld(context, { cell, gap, place }, sequences, size) {
    const side = cell - gap;
    const holders = new Map();
    for (const sequence of sequences) {
      const isFaded = this.chosen !== null && this.chosen !== sequence.seq_id;
      context.fillStyle = sequenceColour(sequence.seq_id);
      let position = 0;
      for (const block of blocksOf(sequence.block_runs)) {
        const [x, y] = place(block);
        const share = Math.min(Math.max((sequence.num_computed - position) / size, 0), 1);
        context.globalAlpha = isFaded ? 0.18 : 0.35; // claimed
        context.fillRect(x, y, side, side);
        context.globalAlpha = isFaded ? 0.25 : 1; // computed
        context.fillRect(x, y + side * (1 - share), side, side * share);
        holders.set(block, (holders.get(block) ?? 0) + 1);
        position += size;
      }
    }
    context.globalAlpha = 1;
    context.strokeStyle = themeColour("--ink");
    context.lineWidth = Math.max(1, cell / 9);
    for (const [block, number] of holders) {
      if (number > 1) {
        const [x, y] = place(block);
        const inset = context.lineWidth / 2;
        context.strokeRect(x + inset, y + inset, side - 2 * inset, side - 2 * inset);
      }
    }
  }

  #trace(context, { cell, gap, place }, blocks) {
    const centre = (block) => place(block).map((edge) => edge + (cell - gap) / 2);
    context.strokeStyle = context.fillStyle = themeColour("--ink");
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.beginPath();
    blocks.forEach((block, index) => (index ? context.lineTo(...centre(block)) : context.moveTo(...centre(block))));
    context.stroke();
    if (blocks.length) {
      context.beginPath();
      context.arc(...centre(blocks[0]), Math.max(2.5, cell / 5), 0, 2 * Math.PI);
      context.fill();
    }
  }
}
