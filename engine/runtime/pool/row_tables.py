"""The block tables of the pool's rows, by group, and their slots of recurrent state; plans report what changes.

Each rank keeps them. The slots are three more tables, of the blocks that a row reads, writes, and writes midway. In place of
blocks that a window has passed stand any others, because kernels may read them. Engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.core.config import SchedulerConfig
from engine.core.step import StepPlan

Changes = NDArray[np.int32]  # [n, 2]: places in `RowTables.rows`, counted from its first entry, and blocks
NO_CHANGES: Changes = np.empty((0, 2), np.int32)


class RowTables:
    """`rows` [tables, slots, width] int32; entries after a table's end are undefined."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.width = max(-(-config.max_model_len // config.block_size), config.state_blocks)
        self._num_groups, self._state_blocks = config.num_groups, config.state_blocks
        num_tables = config.num_groups + (3 if config.state_blocks else 0)
        self.rows = np.zeros((num_tables, config.max_num_seqs, self.width), np.int32)
        # By slot: entries that a device has, see decode_graphs.py.
        self.num_sent = np.zeros(config.max_num_seqs, np.int64)
        self.num_seen = 0  # blocks of the pool, up to the last that was ever in a table

    def follow(self, plan: StepPlan) -> Changes:
        """Make and return the changes of a plan."""
        if not (plan.rows or plan.entries or plan.states):
            return NO_CHANGES
        parts = [
            np.stack((self._place(row.slot, group) + np.arange(len(table)), np.maximum(table, 0)), axis=1)
            for row in plan.rows
            for group, table in enumerate(row.tables)
            if table
        ]
        if plan.entries:
            parts.append(np.array([(self._place(slot, group) + at, block) for slot, group, at, block in plan.entries]))
        for move in plan.states:
            for table, slot in enumerate((move.read or (-1,), move.written, move.midway), self._num_groups):
                parts.append(np.stack((self._place(move.slot, table) + np.arange(len(slot)), slot), axis=1))
        changes = np.concatenate(parts).astype(np.int32) if parts else NO_CHANGES
        self.write(changes)
        return changes

    def _place(self, slot: int, group: int) -> int:
        """Return the place of a row's first entry."""
        return (group * self.rows.shape[1] + slot) * self.width

    def write(self, changes: Changes) -> None:
        """Make changes, also those of another rank's tables."""
        if len(changes):
            places, blocks = changes.T
            self.rows.reshape(-1)[places] = blocks
            self.num_seen = max(self.num_seen, int(blocks.max()) + 1)
            _, slots, indices = np.unravel_index(places, self.rows.shape)
            np.minimum.at(self.num_sent, slots, indices)

    def read_states(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the blocks that rows read in a step, and write; in the next they read what they have written."""
        read, written = self.rows[self._num_groups : -1, slots, : self._state_blocks]
        self.rows[self._num_groups, slots] = self.rows[self._num_groups + 1, slots]
        return read, written

    def midway(self, slots: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the blocks that rows write midway, of those that do."""
        return self.rows[-1, slots, : self._state_blocks]

    def read(self, slots: NDArray[np.int64], into: NDArray[np.int32], first: Sequence[int] = ()) -> None:
        """Copy the slots' rows, each from an entry on if given, into [groups, slots, width], as much as that has."""
        groups, _, width = into.shape
        if any(first):
            places = np.minimum(np.array(first)[:, None] + np.arange(width), self.width - 1)
            into[:] = self.rows[:groups, slots[:, None], places]
        else:
            np.take(self.rows[:groups, :, :width], slots, axis=1, out=into, mode="clip")
