// The KV pool in physical order. A cell is a block; in a pool with more blocks than cells it is a group of adjacent
// blocks. It fills from below: computed positions, claimed ones, cached blocks. A cell wears the colour of the sequence
// that holds it and is ringed if several share it. The chosen sequence's page table is drawn as a line over the pool.

import { prepare } from "./canvas.js";
import { count, sequenceColour, themeColour } from "./dom.js";

const MAX_CELL = 18; // CSS pixels
const MIN_CELL = 6;
const MAX_CELLS = 4096; // the server's bound
const MIN_HEIGHT = 200; // of the largest drawing
const MAX_HEIGHT = 380;
const OTHERS = -1; // the owner where a sequence of another tenant holds the cell

/** The largest square cell with which `needed` cells fit the box, and how many of them do. */
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
  #cells = []; // { held, shared, cached, tokens, owner }
  #grid = null; // { cell, gap, columns, place }
  #needed = 64; // blocks to be shown at least
  chosen = null; // a sequence id

  /** `choose(seqId or null)` is called for the cell under the pointer, `open(seqId)` for a clicked one. */
  constructor(canvas, note, { choose, open }) {
    this.canvas = canvas;
    this.note = note;
    canvas.addEventListener("pointermove", (event) => this.#point(event, choose));
    canvas.addEventListener("pointerleave", () => choose(null));
    canvas.addEventListener("click", (event) => {
      const seqId = this.#ownerAt(event);
      if (seqId !== null) {
        open(seqId);
      }
    });
  }

  /** What the next snapshot should contain: as many cells as fit, of the blocks that have been used. */
  get query() {
    const { width } = this.canvas.getBoundingClientRect();
    const cells = Math.min(layout(Infinity, width, maxHeight()).shown, MAX_CELLS);
    return { cells, blocks: this.#needed };
  }

  set(snapshot) {
    this.#snapshot = snapshot;
    const { runs, num_used: used } = snapshot.cells;
    // Only the used part of the pool is shown: a few blocks of thousands would be a speck. It grows in powers of two,
    // so that the picture seldom changes its scale.
    while (this.#needed < used) {
      this.#needed *= 2;
    }
    this.#cells = runs.flatMap(([length, held, shared, cached, tokens, owner]) =>
      Array(length).fill({ held, shared, cached, tokens, owner }));
  }

  draw() {
    if (!this.#snapshot) {
      return;
    }
    const { cell, columns } = layout(this.#cells.length, this.canvas.clientWidth, maxHeight());
    this.canvas.style.height = `${cell * Math.ceil(this.#cells.length / columns)}px`;
    const { context } = prepare(this.canvas);
    const gap = Math.max(1, Math.round(cell / 9));
    const place = (index) => [(index % columns) * cell, Math.floor(index / columns) * cell];
    this.#grid = { cell, gap, columns, place };
    const colours = { free: themeColour("--free"), cached: themeColour("--cached-block"), ink: themeColour("--ink") };
    this.#cells.forEach((content, index) => this.#paint(context, content, place(index), cell - gap, colours));
    const { page_table: table } = this.#snapshot;
    if (table && this.chosen !== null) {
      this.#trace(context, table, colours.ink);
    }
    this.#describe();
  }

  #paint(context, { held, shared, cached, tokens, owner }, [x, y], side, colours) {
    const { cells, block_size: size } = this.#snapshot;
    const blocks = cells.blocks_per_cell;
    context.fillStyle = colours.free;
    context.fillRect(x, y, side, side);
    let top = y + side;
    const fill = (share, colour, alpha, inset = 0) => {
      context.globalAlpha = alpha;
      context.fillStyle = colour;
      context.fillRect(x + inset, top - side * share + inset, side - 2 * inset, side * share - 2 * inset);
      top -= side * share;
      context.globalAlpha = 1;
    };
    if (held) {
      const isFaded = this.chosen !== null && this.chosen !== owner;
      const colour = owner === OTHERS ? colours.ink : sequenceColour(owner);
      const computed = tokens / (blocks * size);
      fill(computed, colour, isFaded ? 0.25 : 1);
      fill(held / blocks - computed, colour, isFaded ? 0.18 : 0.35);
    }
    if (cached) {
      fill(cached / blocks, colours.cached, 1, blocks === 1 ? side / 5 : 0); // its shape differs from a held one's, too
    }
    if (shared * 2 > held) {
      context.strokeStyle = colours.ink;
      context.lineWidth = Math.max(1, side / 9);
      const inset = context.lineWidth / 2;
      context.strokeRect(x + inset, y + inset, side - 2 * inset, side - 2 * inset);
    }
  }

  /** Draw a page table as a line from its first logical block to its last. */
  #trace(context, table, colour) {
    const { cell, gap, place } = this.#grid;
    const perCell = this.#snapshot.cells.blocks_per_cell;
    const centre = (index) => place(index).map((edge) => edge + (cell - gap) / 2);
    const path = [];
    for (const [first, length] of table) {
      for (let index = Math.floor(first / perCell); index <= Math.floor((first + length - 1) / perCell); index += 1) {
        if (index !== path.at(-1) && index < this.#cells.length) {
          path.push(index);
        }
      }
    }
    if (!path.length) {
      return;
    }
    context.strokeStyle = context.fillStyle = colour;
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.beginPath();
    path.forEach((index, i) => (i ? context.lineTo(...centre(index)) : context.moveTo(...centre(index))));
    context.stroke();
    context.beginPath();
    context.arc(...centre(path[0]), Math.max(2.5, cell / 5), 0, 2 * Math.PI);
    context.fill();
  }

  #describe() {
    const { num_blocks: total, num_groups: groups, block_size: size, cells, blocks, sequences } = this.#snapshot;
    const part = cells.num_blocks < total ? `first ${count(cells.num_blocks)} of ` : "";
    const each = cells.blocks_per_cell > 1 ? `, ${cells.blocks_per_cell} a square` : "";
    const parts = groups > 1 ? ` in one of ${groups} groups of layers` : "";
    this.note.textContent = `${part}${count(total)} blocks of ${size} tokens${parts}${each}`;
    const holders = sequences.filter((sequence) => sequence.num_blocks).length;
    this.canvas.setAttribute("aria-label",
      `The pool: ${blocks.held} of ${total} blocks held by ${holders} sequences, ${blocks.cached} cached`);
  }

  /** The index of the cell under the pointer, or -1. */
  #indexAt({ offsetX, offsetY }) {
    if (!this.#grid) {
      return -1;
    }
    const { cell, columns } = this.#grid;
    const [column, line] = [Math.floor(offsetX / cell), Math.floor(offsetY / cell)];
    const index = line * columns + column;
    return column < columns && index < this.#cells.length ? index : -1;
  }

  #ownerAt(event) {
    const { held, owner } = this.#cells[this.#indexAt(event)] ?? {};
    return held && owner >= 0 ? owner : null;
  }

  #point(event, choose) {
    const index = this.#indexAt(event);
    choose(this.#ownerAt(event));
    if (index < 0) {
      this.canvas.title = "";
      return;
    }
    const { blocks_per_cell: perCell, num_blocks: shown } = this.#snapshot.cells;
    const { held, shared, cached, owner } = this.#cells[index];
    const first = index * perCell;
    const last = Math.min(first + perCell, shown) - 1;
    const name = first === last ? `Block ${first}` : `Blocks ${first} to ${last}`;
    const facts = first === last ? describeBlock(held, shared, cached, owner)
      : `${held} held, ${cached} cached, ${last - first + 1 - held - cached} free`;
    this.canvas.title = `${name}: ${facts}`;
  }
}

/** The height of the drawing when it is full, in CSS pixels. */
const maxHeight = () => Math.min(Math.max(innerHeight * 0.32, MIN_HEIGHT), MAX_HEIGHT);

function describeBlock(held, shared, cached, owner) {
  if (held) {
    return shared ? "shared by several sequences" : owner === OTHERS ? "held" : `held by sequence ${owner}`;
  }
  return cached ? "cached prefix" : "free";
}
