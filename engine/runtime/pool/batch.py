"""Builds a step's index tensors from a StepPlan: a Packet of host arrays, then a Batch on the device.

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
from numpy.typing import NDArray
from torch import Tensor

from engine.core.config import SchedulerConfig
from engine.core.step import SequenceSlice, StepPlan
from engine.runtime.attention.base import Batch
from engine.runtime.transfer import Staging

_SCORED_BYTES = 64 << 20  # logits at a time while a prompt's log probabilities are computed


class Packet(NamedTuple):
    """A step's forward pass of T tokens in S slices: all that a rank needs, as arrays on the host."""

    longs: NDArray[np.int64]  # ids, positions [T], kv_slots [groups, T]; sample rows [R]; carry rows and their slots
    ints: NDArray[np.int32]  # query_starts [S + 1], context_lens [S], block tables [groups, S, widest]
    num_slices: int
    num_tokens: int
    num_samples: int
    scored: Sequence[tuple[int, int]]  # (first token, tokens): rows of prompts that go through the LM head as well
    keeps_all: bool  # the hidden states of all tokens are wanted, not only those of sample rows
    query_lens: Sequence[int]  # as in a Batch, from `ints`
    contexts: Sequence[int]
    tables: Sequence[Sequence[Sequence[int]]]  # by group


class DecodeRows(NamedTuple):
    """A step of R rows with one token each: all that a rank needs to launch it as a graph. See decode_inputs.py."""

    fields: NDArray[np.int64]  # [fields, R]
    grown: NDArray[np.int64]  # [entries, 2]: places in the block tables, and the blocks to write there before


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
    a preemption has another list. So a row is updated from its last known block on. In place of blocks that a window has
    passed there are any others, because kernels may read them.
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
            np.maximum(self._rows[slot, begin:num_blocks], 0, out=self._rows[slot, begin:num_blocks])
        self._known[slot], self._lengths[slot] = table, num_blocks

    def read(self, slots: Sequence[int], into: np.ndarray) -> None:
        """Copy the slots' rows, cut to the width of `into`; entries after an end are undefined."""
        np.take(self._rows[:, : into.shape[1]], slots, axis=0, out=into)


class PacketBuffers:
    """Host memory for packets on their way to one device."""

    def __init__(self, config: SchedulerConfig, device: torch.device) -> None:
        seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
        widest = -(-config.max_model_len // config.block_size)
        self._num_groups = config.num_groups
        self.num_longs = (3 + config.num_groups) * tokens + 3 * seqs  # with drafts, every token may draw
        self.num_ints = 2 * seqs + 1 + config.num_groups * seqs * widest
        pair = [
            (Staging((self.num_longs,), torch.int64, device), Staging((self.num_ints,), torch.int32, device))
            for _ in range(2)
        ]
        self._turns = cycle(pair)
        self._longs, self._ints = pair[0]

    def begin(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return memory for the arrays of the next packet."""
        self._longs, self._ints = next(self._turns)
        return self._longs.begin(), self._ints.begin()

    def fill(self, packet: Packet) -> Packet:
        """Return a packet from elsewhere in this memory."""
        longs, ints = self.begin()
        longs[: len(packet.longs)], ints[: len(packet.ints)] = packet.longs, packet.ints
        return packet

    def to_batch(self, packet: Packet, last_ids: Tensor) -> Batch:
        """Return the tensors of a packet in the memory of `begin`; `last_ids` [max_num_seqs] int64 are the slots'."""
        longs, ints = self._longs.send(len(packet.longs)), self._ints.send(len(packet.ints))
        num_slices, num_tokens = packet.num_slices, packet.num_tokens
        num_heads, num_groups = 2 * num_slices + 1, self._num_groups
        ids, first_row = longs[:num_tokens], (2 + num_groups) * num_tokens
        first_carry = first_row + packet.num_samples
        if len(longs) > first_carry:
            rows, slots = longs[first_carry:].view(2, -1).unbind(0)
            ids.index_copy_(0, rows, last_ids.index_select(0, slots))
        kv_slots = longs[2 * num_tokens : first_row].view(num_groups, num_tokens)
        tables = ints[num_heads:].view(num_groups, num_slices, -1)
        batch = Batch(
            ids=ids,
            positions=longs[num_tokens : 2 * num_tokens],
            kv_slots=kv_slots[0],
            block_tables=tables[0],
            query_starts=ints[: num_slices + 1],
            context_lens=ints[num_slices + 1 : num_heads],
            sample_rows=longs[first_row:first_carry],
            query_lens_host=packet.query_lens,
            context_lens_host=packet.contexts,
            block_tables_host=packet.tables[0],
        )
        if num_groups > 1:
            batch.others = [
                batch.of_group(*each) for each in zip(kv_slots[1:], tables[1:], packet.tables[1:], strict=True)
            ]
        return batch


def scored_portions(hidden: Tensor, rows: tuple[int, int], vocab_size: int) -> Sequence[Tensor]:
    """Return hidden states of (first row, rows) in portions whose logits have a bounded size."""
    first, num = rows
    return hidden[first : first + num].split(max(1, _SCORED_BYTES // (4 * vocab_size))) if num else ()


def num_scored(piece: SequenceSlice) -> int:
    """Return how many of the slice's positions have a next prompt token, whose log probability is wanted."""
    return max(min(piece.start + piece.num_tokens + 1, piece.num_prompt) - (piece.start + 1), 0)


class BatchBuilder:
    """Makes packets and batches for one pool of blocks, on one device."""

    def __init__(self, config: SchedulerConfig, device: torch.device) -> None:
        self._block_size = config.block_size
        widest = -(-config.max_model_len // config.block_size)
        self._tables = [_BlockTables(config.max_num_seqs, widest) for _ in range(config.num_groups)]
        self._buffers = PacketBuffers(config, device)

    def build(self, plan: StepPlan, last_ids: Tensor) -> Batch:
        """Return one step's tensors; `last_ids` [max_num_seqs] int64 has each slot's last id."""
        return self.to_batch(self.prepare(plan), last_ids)

    def to_batch(self, packet: Packet, last_ids: Tensor) -> Batch:
        """Return the tensors of the packet that was prepared last."""
        return self._buffers.to_batch(packet, last_ids)

    def prepare(self, plan: StepPlan) -> Packet:
        """Return what a step's forward pass needs, in memory that the packet after the next overwrites."""
        long_buffer, array = self._buffers.begin()
        lists = self._walk(plan.slices)
        by_group = [[piece.block_table for piece in plan.slices]]
        for index, rows in enumerate(self._tables[1:]):
            by_group.append([piece.window_tables[index] for piece in plan.slices])
            self._find_slots(plan.slices, by_group[-1], rows, lists.kv_slots)
        flat = lists.ids + lists.positions + lists.kv_slots + lists.sample_rows + lists.carry_rows + lists.carry_slots
        long_buffer[: len(flat)] = flat

        num_slices = len(plan.slices)
        width = -(-max(lists.contexts) // self._block_size)
        num_heads = 2 * num_slices + 1
        array[:num_heads] = lists.starts + lists.contexts
        num_ints = num_heads + len(by_group) * num_slices * width
        tables = array[num_heads:num_ints].reshape(len(by_group), num_slices, width)
        slots = [piece.slot for piece in plan.slices]
        for held, into in zip(self._tables, tables, strict=True):
            held.read(slots, into)
        return Packet(
            longs=long_buffer[: len(flat)],
            ints=array[:num_ints],
            num_slices=num_slices,
            num_tokens=lists.starts[-1],
            num_samples=len(lists.sample_rows),
            scored=[
                (first, num_scored(piece))
                for first, piece in zip(lists.starts, plan.slices, strict=False)
                if piece.prompt_logprobs >= 0
            ],
            keeps_all=any(piece.prompt_logprobs >= 0 or piece.params.pooling is not None for piece in plan.slices),
            query_lens=[piece.num_tokens for piece in plan.slices],
            contexts=lists.contexts,
            tables=by_group,
        )

    def _walk(self, slices: Sequence[SequenceSlice]) -> _Lists:
        """Return the lists of a plan's slices, with the first group's slots; also updates its block tables."""
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
            _add_slots(kv_slots, table, start, stop, size)
            sample_rows += [end - 1] * len(piece.samples)
            starts.append(end)
            contexts.append(stop)
            self._tables[0].update(slot, table, -(-stop // size))
        return lists

    def _find_slots(
        self,
        slices: Sequence[SequenceSlice],
        tables: Sequence[Sequence[int]],
        rows: _BlockTables,
        kv_slots: list[int],
    ) -> None:
        """Append the slots of a plan's slices in a further group, and update its block tables."""
        for piece, table in zip(slices, tables, strict=True):
            stop = piece.start + piece.num_tokens
            _add_slots(kv_slots, table, piece.start, stop, self._block_size)
            rows.update(piece.slot, table, -(-stop // self._block_size))


def _add_slots(kv_slots: list[int], table: Sequence[int], start: int, stop: int, size: int) -> None:
    """Append the slots of positions start .. stop - 1, a block at a time."""
    while start < stop:
        block, offset = divmod(start, size)
        num = min(size - offset, stop - start)
        first = table[block] * size + offset
        kv_slots += range(first, first + num)
        start += num
