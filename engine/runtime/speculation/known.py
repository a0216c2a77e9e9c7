"""Which positions of sequences have a drafter's K/V, by block. Engine thread."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.core.config import SchedulerConfig
from engine.core.rows import SequenceSlice
from engine.core.step import StepPlan
from engine.runtime.pool.tables import RowTables


class KnownPositions:
    """The positions that have K/V: a number for each block, counted from its first."""

    def __init__(self, config: SchedulerConfig, tables: RowTables, *, travels: bool = False) -> None:
        """With `travels` blocks that are swapped or come from elsewhere bring a drafter's K/V, as far as it had any there."""
        self._block_size, self._tables = config.block_size, tables
        self._num_brought = config.block_size * travels
        self._counts = np.zeros(config.num_blocks, np.int64)
        self._num_full: dict[int, int] = {}  # by slot: known first blocks

    def follow(self, plan: StepPlan, slices: Sequence[SequenceSlice]) -> None:
        """Note that a step writes other blocks and tokens, which voids what was there."""
        counts = self._counts
        for source, destination in plan.copies:
            counts[destination] = counts[source]
        for _, destination in plan.swap_in:
            counts[destination] = self._num_brought
        for row in plan.rows:
            self._num_full[row.slot] = 0
        for piece in slices:
            blocks, firsts = self._blocks(piece.slot, piece.start, piece.start + piece.num_tokens)
            counts[blocks] = np.minimum(counts[blocks], np.maximum(piece.start - firsts, 0))

    def _blocks(self, slot: int, begin: int, end: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the blocks of positions begin .. end - 1, and each one's first position."""
        first, stop = begin // self._block_size, min(-(-end // self._block_size), self._tables.width)
        return self._tables.rows[0, slot, first:stop], np.arange(first, stop) * self._block_size

    def bring(self, blocks: Sequence[int]) -> None:
        """Note that these blocks come from elsewhere."""
        self._counts[list(blocks)] = self._num_brought

    def up_to(self, piece: SequenceSlice) -> int:
        """Return a sequence's first missing position, at most the slice's first."""
        size, table = self._block_size, self._tables.rows[0, piece.slot]
        last = piece.start // size
        at = min(self._num_full.get(piece.slot, 0), last)
        while at < last and self._counts[table[at]] == size:
            at += 1
        self._num_full[piece.slot] = at
        return min(at * size + int(self._counts[table[at]]), piece.start)

    def note(self, slot: int, begin: int, end: int, void: int = 0) -> None:
        """Note that positions `begin` to `end` are computed, and `end` to `void` are not."""
        blocks, firsts = self._blocks(slot, begin, max(end, void))
        counts, is_joined = self._counts[blocks], self._counts[blocks] >= begin - firsts
        self._counts[blocks] = np.where(is_joined, np.clip(end - firsts, 0, self._block_size), counts)

    def first_block(self, slot: int, position: int) -> int | None:
        """Return the first of the blocks behind the last gap before a position, None if the gap is in its own."""
        at, offset = divmod(position, self._block_size)
        counts = self._counts[self._tables.rows[0, slot, : at + 1]]
        gaps = np.flatnonzero(counts[:at] < self._block_size)
        return None if counts[at] < offset else int(gaps[-1]) + 1 if len(gaps) else 0
