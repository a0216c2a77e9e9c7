// The KV pool in physical order. A cell is a block; in a pool with more blocks than cells it is a group of adjacent
// blocks. It fills from below: computed positions, claimed ones, cached blocks. A cell wears the colour of the sequence
// that holds it and is ringed if several share it. The cells of a chosen sequence stand out.

import { count, sequenceColour, themeColour } from "./dom.js";

const MAX_CELL = 18; // CSS pixels
const MIN_CELL = 6;
const MAX_CELLS = 4096; // the server's bound
const OTHERS = -1; // the owner where a sequence of another tenant holds the cell

/** The height of the drawing when it is full, in CSS pixels. */
const maxHeight = () => Math.min(Math.max(innerHeight * 0.32, 200), 380);

/** Return the largest square cell with which `needed` cells fit the box, and how many of them do. */
function layout(needed, width, height) {
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
  #grid = { cell: MAX_CELL, columns: 1 };
  #needed = 64; // blocks to be shown at least
  #chosen = null; // a sequence id

  /** `choose(seqId or null)` is called for the cell under the pointer, `open(seqId)` for a clicked one. */
  constructor(canvas, note, { choose, open }) {
    Object.assign(this, { canvas, note });
    canvas.addEventListener("pointermove", (event) => {
      choose(this.#ownerAt(event));
      canvas.title = this.#describe(this.#indexAt(event));
    });
    canvas.addEventListener("pointerleave", () => choose(null));
    canvas.addEventListener("click", (event) => {
      const seqId = this.#ownerAt(event);
      if (seqId !== null) {
        open(seqId);
      }
    });
    document.addEventListener("themechange", () => this.#draw());
    new ResizeObserver(() => this.#draw()).observe(canvas);
  }

  /** What the next snapshot should contain: as many cells as fit, of the blocks that have been used. */
  get query() {
    const cells = Math.min(layout(Infinity, this.canvas.clientWidth, maxHeight()).shown, MAX_CELLS);
    return { cells, blocks: this.#needed };
  }

  show(snapshot) {
    this.#snapshot = snapshot;
    const { num_blocks: total, num_groups: groups, block_size: size, cells, blocks, sequences } = snapshot;
    // Only the used part of the pool is shown: a few blocks of thousands would be a speck. It grows in powers of two,
    // so that the picture seldom changes its scale.
    while (this.#needed < cells.num_used) {
      this.#needed *= 2;
    }
    this.#cells = cells.runs.flatMap(([length, held, shared, cached, tokens, owner]) =>
      Array(length).fill({ held, shared, cached, tokens, owner }));
    const part = cells.num_blocks < total ? `first ${count(cells.num_blocks)} of ` : "";
    const each = cells.blocks_per_cell > 1 ? `, ${cells.blocks_per_cell} a square` : "";
    const parts = groups > 1 ? ` in one of ${groups} groups of layers` : "";
    this.note.textContent = `${part}${count(total)} blocks of ${size} tokens${parts}${each}`;
    const holders = sequences.filter((sequence) => sequence.num_blocks).length;
    this.canvas.setAttribute("aria-label",
      `The pool: ${blocks.held} of ${total} blocks held by ${holders} sequences, ${blocks.cached} cached`);
    this.#draw();
  }

  /** Let a sequence's cells stand out; null for none. */
  choose(seqId) {
    if (this.#chosen !== seqId) {
      this.#chosen = seqId;
      this.#draw();
    }
  }

  #draw() {
    const { canvas } = this;
    const { cell, columns } = (this.#grid = layout(this.#cells.length, canvas.clientWidth, maxHeight()));
    canvas.style.height = `${cell * Math.ceil(this.#cells.length / columns)}px`;
    [canvas.width, canvas.height] = [canvas.clientWidth, canvas.clientHeight].map((side) => Math.round(side * devicePixelRatio));
    const context = canvas.getContext("2d");
    context.scale(devicePixelRatio, devicePixelRatio);
    const [free, stored, ink] = ["--free", "--cached-block", "--ink"].map((name) => themeColour(canvas, name));
    const colours = { free, cached: stored, ink };
    const side = cell - Math.max(1, Math.round(cell / 9));
    this.#cells.forEach((content, index) =>
      this.#paint(context, content, (index % columns) * cell, Math.floor(index / columns) * cell, side, colours));
  }

  #paint(context, { held, shared, cached, tokens, owner }, x, y, side, colours) {
    const { cells, block_size: size } = this.#snapshot;
    const blocks = cells.blocks_per_cell;
    let top = y + side;
    const fill = (share, colour, alpha, inset = 0) => {
      context.globalAlpha = alpha;
      context.fillStyle = colour;
      context.fillRect(x + inset, top - side * share + inset, side - 2 * inset, side * share - 2 * inset);
      top -= side * share;
    };
    fill(1, colours.free, 1);
    top = y + side;
    if (held) {
      const isFaded = this.#chosen !== null && this.#chosen !== owner;
      const colour = owner === OTHERS ? colours.ink : sequenceColour(owner);
      const computed = tokens / (blocks * size);
      fill(computed, colour, isFaded ? 0.25 : 1);
      fill(held / blocks - computed, colour, isFaded ? 0.18 : 0.35);
    }
    if (cached) {
      fill(cached / blocks, colours.cached, 1, blocks === 1 ? side / 5 : 0); // its shape differs from a held one's, too
    }
    if (shared * 2 > held) {
      context.globalAlpha = 1;
      context.strokeStyle = colours.ink;
      context.lineWidth = Math.max(1, side / 9);
      const inset = context.lineWidth / 2;
      context.strokeRect(x + inset, y + inset, side - 2 * inset, side - 2 * inset);
    }
  }

  #indexAt({ offsetX, offsetY }) {
    const { cell, columns } = this.#grid;
    const column = Math.floor(offsetX / cell);
    return column < columns ? Math.floor(offsetY / cell) * columns + column : -1;
  }

  #ownerAt(event) {
    const { held, owner } = this.#cells[this.#indexAt(event)] ?? {};
    return held && owner >= 0 ? owner : null;
  }

  #describe(index) {
    if (!this.#cells[index]) {
      return "";
    }
    const { held, shared, cached, owner } = this.#cells[index];
    const { blocks_per_cell: perCell, num_blocks: number } = this.#snapshot.cells;
    const first = index * perCell;
    const last = Math.min(first + perCell, number) - 1;
    if (first < last) {
      return `Blocks ${first} to ${last}: ${held} held, ${cached} cached, ${last - first + 1 - held - cached} free`;
    }
    const holder = shared ? "shared by several sequences" : owner === OTHERS ? "held" : `held by sequence ${owner}`;
    return `Block ${first}: ${held ? holder : cached ? "cached prefix" : "free"}`;
  }
}
