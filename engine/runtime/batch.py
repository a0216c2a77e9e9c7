"""Builds a step's index tensors from a StepPlan; no other module makes them.

One pass over the slices makes plain lists. They go into a host buffer (pinned for a GPU) and to the device in one copy
for each type. Block tables persist between steps, one row a slot, and only new entries are written. The buffers come in
pairs, used alternately, so that with overlap the next step need not wait for the previous copy. An id that is not known
yet, because the previous step draws it, is read on the device from `last_ids[slot]`. Engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.core.config import SchedulerConfig
from engine.core.step import SequenceSlice, StepPlan
from engine.runtime.attention.base import Batch
from engine.runtime.transfer import Staging


class _Lists(NamedTuple):
    """The result of one pass over a plan's slices, by token or by slice."""

    ids: list[int]
    positions: list[int]
    kv_slots: list[int]
    sample_rows: list[int]
    carry_rows: list[int]  # tokens whose ids the step before has drawn ...
    carry_slots: list[int]  # ... and for which slots
    starts: list[int]  # of each slice's tokens, and the end of the last
    contexts: list[int]


class _BlockTables:
    """The running sequences' block tables as one array, a row a slot.

    A table grows at its end, and only its last block may be replaced, by a copy-on-write. A sequence that resumes after
    a preemption has another list. So a row is updated from its last known block on.
    """

    def __init__(self, num_slots: int, widest: int) -> None:
        self._rows = np.zeros((num_slots, widest), dtype=np.int32)
        self._known: list[Sequence[int]] = [()] * num_slots  # the list that each row is of
        self._lengths = [0] * num_slots

    def update(self, slot: int, table: Sequence[int], num_blocks: int) -> None:
        """Update the slot's row to begin with the table's first `num_blocks`."""
        begin = self._lengths[slot] - 1 if self._known[slot] is table else 0
        if begin == num_blocks - 1:
            self._rows[slot, begin] = table[begin]
        else:
            self._rows[slot, begin:num_blocks] = table[begin:num_blocks]
        self._known[slot], self._lengths[slot] = table, num_blocks

    def read(self, slots: Sequence[int], into: np.ndarray) -> None:
        """Copy the slots' rows, cut to the width of `into`; entries after an end are undefined."""
        np.take(self._rows[:, : into.shape[1]], slots, axis=0, out=into)


class BatchBuilder:
    """Makes Batches for one pool of blocks, on one device."""

    def __init__(self, config: SchedulerConfig, device: torch.device) -> None:
        seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
        widest = -(-config.max_model_len // config.block_size)
        self._block_size = config.block_size
        self._tables = _BlockTables(seqs, widest)
        num_longs, num_ints = 4 * tokens + 3 * seqs, 2 * seqs + 1 + seqs * widest  # with drafts, every token may draw
        pair = [
            (Staging((num_longs,), torch.int64, device), Staging((num_ints,), torch.int32, device)) for _ in range(2)
        ]
        self._turns = cycle(pair)

    def build(self, plan: StepPlan, last_ids: Tensor) -> Batch:
        """Return one step's tensors; `last_ids` [max_num_seqs] int64 has each slot's last id."""
        long_buffer, int_buffer = next(self._turns)
        lists = self._walk(plan.slices)
        flat = lists.ids + lists.positions + lists.kv_slots + lists.sample_rows + lists.carry_rows + lists.carry_slots
        long_buffer.begin()[: len(flat)] = flat
        longs = long_buffer.send(len(flat))

        num_slices, num_tokens = len(plan.slices), plan.num_tokens
        width = -(-max(lists.contexts) // self._block_size)
        num_heads = 2 * num_slices + 1
        array = int_buffer.begin()
        array[:num_heads] = lists.starts + lists.contexts
        num_ints = num_heads + num_slices * width
        tables = array[num_heads:num_ints].reshape(num_slices, width)
        self._tables.read([piece.slot for piece in plan.slices], tables)
        ints = int_buffer.send(num_ints)

        ids, first_carry = longs[:num_tokens], 3 * num_tokens + plan.num_samples
        if lists.carry_rows:
            rows, slots = longs[first_carry:].view(2, -1).unbind(0)
            ids.index_copy_(0, rows, last_ids.index_select(0, slots))
        return Batch(
            ids=ids,
            positions=longs[num_tokens : 2 * num_tokens],
            kv_slots=longs[2 * num_tokens : 3 * num_tokens],
            block_tables=ints[num_heads:].view(num_slices, width),
            query_starts=ints[: num_slices + 1],
            context_lens=ints[num_slices + 1 : num_heads],
            sample_rows=longs[3 * num_tokens : first_carry],
            query_lens_host=[piece.num_tokens for piece in plan.slices],
            context_lens_host=lists.contexts,
            block_tables_host=[piece.block_table for piece in plan.slices],
        )

    def _walk(self, slices: Sequence[SequenceSlice]) -> _Lists:
        """Return the lists of a plan's slices; also updates the block tables."""
        lists = _Lists([], [], [], [], [], [], [0], [])
        ids, positions, kv_slots, sample_rows, carry_rows, carry_slots, starts, contexts = lists
        end, size = 0, self._block_size
        for piece in slices:
            slot, tokens, start, table, drafts = piece.slot, piece.tokens, piece.start, piece.block_table, piece.drafts
            stop, end = start + piece.num_tokens, end + piece.num_tokens
            ids += tokens[start:stop]
            if drafts:
                ids += drafts
                sample_rows += range(end - len(drafts) - 1, end - 1)  # and, as of any slice, from the last
            elif len(tokens) < stop:
                ids.append(0)
                carry_rows.append(end - 1)
                carry_slots.append(slot)
            positions += range(start, stop)
            while start < stop:  # a block at a time
                block, offset = divmod(start, size)
                num = min(size - offset, stop - start)
                first = table[block] * size + offset
                kv_slots += range(first, first + num)
                start += num
            sample_rows += [end - 1] * len(piece.samples)
            starts.append(end)
            contexts.append(stop)
            self._tables.update(slot, table, -(-stop // size))
        return lists
