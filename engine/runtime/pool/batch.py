"""Builds a step's index tensors from its slices: a Packet of host arrays, then a Batch on the device.

One pass over the slices makes plain lists. They go into a host buffer (pinned for a GPU) and to the device in one copy
for each type; rows of block tables are added to it, see row_tables.py. The buffers come in pairs, used alternately, so that
with overlap the next step need not wait for the previous copy. An id that is not known yet, because the previous step
draws it, is read on the device from `last_ids[slot]`. Engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.config import SchedulerConfig
from engine.core.rows import SequenceSlice
from engine.core.step import Pairs, StateMove
from engine.core.types import PoolingParams
from engine.runtime.attention.backend import Batch
from engine.runtime.kv_layout import StepStates
from engine.runtime.parallel.group import SINGLE, Group
from engine.runtime.pool.row_tables import NO_CHANGES, Changes, RowTables
from engine.runtime.transfer import Staging

_SCORED_BYTES = 64 << 20  # logits at a time while a prompt's log probabilities are computed


class Packet(NamedTuple):
    """A step's forward pass of T tokens in S slices: all that a rank needs, as arrays on the host."""

    longs: NDArray[np.int64]  # ids, positions [T], kv_slots [groups, T]; sample rows [R]; carry rows and their slots
    ints: NDArray[np.int32]  # query_starts [S + 1], context_lens [S]; of recurrent layers drafts, replays, midways
    slots: NDArray[np.int64]  # [S], whose rows of the block tables are read
    changes: Changes  # of the block tables, before the step
    num_slices: int
    num_tokens: int
    num_samples: int
    scored: Sequence[tuple[int, int]]  # (first token, tokens): rows of prompts that go through the LM head as well
    keeps_all: bool  # the hidden states of all tokens are wanted, not only those of sample rows
    query_lens: Sequence[int]  # as in a Batch, from `ints`
    contexts: Sequence[int]


class DecodeRows(NamedTuple):
    """A step of R rows with one token each: all that a rank needs to launch it as a graph. See decode_graphs.py."""

    fields: NDArray[np.int64]  # [fields, R]
    changes: Changes  # of the block tables, before the step


class Ranks:
    """The other ranks, seen from the first one's runner, which do what they are sent, in the same order; here none.

    engine/ranks/executor.py has them as processes, and ends them. Engine thread, after the thread that builds the engine.
    """

    group: Group = SINGLE  # of all ranks

    def send(self, work: Packet | DecodeRows, *, draws: bool) -> None:
        """Have them compute a step; `share` follows where it `draws` ids outside of a graph."""

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Have them copy blocks, in a step without tokens."""

    def share(self, last_ids: Tensor) -> None:
        """Send them the drawn ids, if they may need them before the host knows them."""

    def configure(self, config: SchedulerConfig) -> None:
        """Have them allocate the pool with these sizes, and drop their graphs."""

    def capture(self) -> None:
        """Have them capture the graphs of decode steps."""

    def least_room(self, room: int) -> int:
        """Return the least of the bytes that all ranks' devices have left for K/V and steps, this one's being `room`."""
        return room

    def hold_to_share(self) -> None:
        """Have them hold torch to their share of their devices' memory."""

    def await_event(self, event: torch.cuda.Event) -> None:
        """Wait until the device has reached an event. Raises GroupError if a rank is lost or hangs."""
        event.synchronize()


ALONE = Ranks()


class _Lists(NamedTuple):
    """The result of one pass over a plan's slices, by token or by slice."""

    ids: list[int]
    positions: list[int]
    sample_rows: list[int]
    carry_rows: list[int]  # tokens whose ids the step before has drawn ...
    carry_slots: list[int]  # ... and for which slots
    starts: list[int]  # of each slice's tokens, and the end of the last
    contexts: list[int]


class PacketBuffers:
    """Host memory for packets on their way to one device."""

    def __init__(self, config: SchedulerConfig, device: torch.device, tables: RowTables) -> None:
        seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
        self._num_groups, self._block_size, self._tables = config.num_groups, config.block_size, tables
        self.num_longs = (3 + config.num_groups) * tokens + 3 * seqs  # with drafts, every token may draw
        self._has_states = config.state_blocks > 0
        self.num_ints = 5 * seqs + 1 + config.num_groups * seqs * tables.width
        pair = [
            (Staging((self.num_longs,), torch.int64, device), Staging((self.num_ints,), torch.int32, device))
            for _ in range(2)
        ]
        self._turns = cycle(pair)
        self._longs, self._ints = pair[0]
        self._host_ints = np.empty(0, np.int32)

    def begin(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return memory for the arrays of the next packet."""
        self._longs, self._ints = next(self._turns)
        self._host_ints = self._ints.begin()
        return self._longs.begin(), self._host_ints

    def fill(self, packet: Packet) -> Packet:
        """Return a packet from elsewhere in this memory, with its changes made."""
        self._tables.write(packet.changes)
        longs, ints = self.begin()
        longs[: len(packet.longs)], ints[: len(packet.ints)] = packet.longs, packet.ints
        return packet

    def to_batch(self, packet: Packet, last_ids: Tensor, first_blocks: Sequence[int] = ()) -> Batch:
        """Return the tensors of a packet in the memory of `begin`; `last_ids` [max_num_seqs] int64 are the slots'."""
        num_slices, num_tokens, num_groups = packet.num_slices, packet.num_tokens, self._num_groups
        num_heads, width = len(packet.ints), -(-max(packet.contexts) // self._block_size)
        host_tables = self._host_ints[num_heads : num_heads + num_groups * num_slices * width]
        host_tables = host_tables.reshape(num_groups, num_slices, width)
        self._tables.read(packet.slots, host_tables, first_blocks)
        num_carried = (len(packet.longs) - (2 + num_groups) * num_tokens - packet.num_samples) // 2
        ids, positions, *kv_slots, sample_rows, rows, slots = self._longs.send(
            [(num_tokens,)] * (2 + num_groups) + [(packet.num_samples,), (num_carried,), (num_carried,)]
        )
        starts, contexts, _, *tables = self._ints.send(
            [(num_slices + 1,), (num_slices,), (num_heads - 2 * num_slices - 1,), *[(num_slices, width)] * num_groups]
        )
        if num_carried:
            ids.index_copy_(0, rows, last_ids.index_select(0, slots))
        batch = Batch(
            ids=ids,
            positions=positions,
            kv_slots=kv_slots[0],
            block_tables=tables[0],
            query_starts=starts,
            context_lens=contexts,
            sample_rows=sample_rows,
            query_lens_host=packet.query_lens,
            context_lens_host=packet.contexts,
            block_tables_host=_rows(host_tables[0]),
        )
        if self._has_states:
            batch.states = self._states(packet)
        if num_groups > 1:
            batch.others = [
                batch.of_group(slots, table, _rows(host))
                for slots, table, host in zip(kv_slots[1:], tables[1:], host_tables[1:], strict=True)
            ]
        return batch

    def _states(self, packet: Packet) -> StepStates:
        """Return the slots of a step, which is launched once."""
        starts = packet.ints[: packet.num_slices + 1].copy()
        drafts, replays, snapshots = packet.ints[2 * packet.num_slices + 1 :].reshape(3, -1).copy()
        slots, kept = packet.slots, np.diff(starts) - drafts
        read, written = self._tables.read_states(slots)
        midway = np.where(replays[:, None] > 0, read, self._tables.midway(slots))
        after = np.maximum(replays, snapshots)
        return StepStates(read, written, starts, kept, replays, slots.astype(np.int32), midway, after)


def _rows(table: NDArray[np.int32]) -> Sequence[Sequence[int]]:
    return cast("Sequence[Sequence[int]]", table)


def scored_portions(hidden: Tensor, rows: tuple[int, int], vocab_size: int) -> Sequence[Tensor]:
    """Return hidden states of (first row, rows) in portions whose logits have a bounded size."""
    first, num = rows
    return hidden[first : first + num].split(max(1, _SCORED_BYTES // (4 * vocab_size))) if num else ()


def num_scored(piece: SequenceSlice) -> int:
    """Return how many of the slice's positions have a next prompt token, whose log probability is wanted."""
    return max(min(piece.start + piece.num_tokens + 1, piece.num_prompt) - (piece.start + 1), 0)


class BatchBuilder(PacketBuffers):
    """Makes packets and batches for one pool of blocks, on one device; `batch` is the one that is computed, if it may pause."""

    batch: Batch | None = None

    def build(self, slices: Sequence[SequenceSlice], last_ids: Tensor, first_blocks: Sequence[int] = ()) -> Batch:
        """Return one step's tensors; `last_ids` [max_num_seqs] int64 has each slot's last id.

        `first_blocks` are the first that each slice attends to, if not the sequence's.
        """
        packet = self.prepare(slices)
        if any(first_blocks):
            contexts = np.array(packet.contexts) - np.array(first_blocks) * self._block_size
            packet.ints[len(slices) + 1 : 2 * len(slices) + 1] = contexts
            packet = packet._replace(contexts=contexts.tolist())
        return self.to_batch(packet, last_ids, first_blocks)

    def prepare(
        self,
        slices: Sequence[SequenceSlice],
        changes: Changes = NO_CHANGES,
        replays: Pairs = (),
        states: Sequence[StateMove] = (),
    ) -> Packet:
        """Return what a step's forward pass needs, in memory that the packet after the next overwrites.

        `replays` and `states` are the plan's. Other ranks make the `changes` of the tables, which are made here already.
        """
        longs, ints = self.begin()
        ids, positions, sample_rows, carry_rows, carry_slots, starts, contexts = _walk(slices)
        num_tokens, query_lens = starts[-1], [piece.num_tokens for piece in slices]
        slots = np.array([piece.slot for piece in slices], np.int64)
        first = (2 + self._num_groups) * num_tokens
        others = sample_rows + carry_rows + carry_slots
        longs[: 2 * num_tokens] = ids + positions
        kv_slots = longs[2 * num_tokens : first].reshape(self._num_groups, num_tokens)
        at, offsets = np.divmod(longs[num_tokens : 2 * num_tokens], self._block_size)
        rows = slots if num_tokens == len(slices) else np.repeat(slots, query_lens)
        kv_slots[:] = self._tables.rows[: self._num_groups, rows, at]
        kv_slots *= self._block_size
        kv_slots += offsets
        longs[first : first + len(others)] = others
        heads = starts + contexts
        if self._has_states:
            heads += [len(piece.drafts) for piece in slices]
            for numbers in (dict(replays), {move.slot: move.midway_after for move in states}):
                heads += [numbers.get(piece.slot, 0) for piece in slices]
        num_heads = len(heads)
        ints[:num_heads] = heads
        return Packet(
            longs=longs[: first + len(others)],
            ints=ints[:num_heads],
            slots=slots,
            changes=changes,
            num_slices=len(slices),
            num_tokens=num_tokens,
            num_samples=len(sample_rows),
            scored=[
                (first, num_scored(piece))
                for first, piece in zip(starts, slices, strict=False)
                if piece.prompt_logprobs >= 0
            ],
            keeps_all=any(piece.prompt_logprobs >= 0 or isinstance(piece.params, PoolingParams) for piece in slices),
            query_lens=query_lens,
            contexts=contexts,
        )


def _walk(slices: Sequence[SequenceSlice]) -> _Lists:
    """Return the lists of a step's slices."""
    lists = _Lists([], [], [], [], [], [0], [])
    ids, positions, sample_rows, carry_rows, carry_slots, starts, contexts = lists
    end = 0
    for piece in slices:
        tokens, start, drafts = piece.tokens, piece.start, piece.drafts
        stop, end = start + piece.num_tokens, end + piece.num_tokens
        ids += tokens[start : stop - len(drafts)]
        if drafts:
            ids += drafts
            sample_rows += range(end - len(drafts) - 1, end - 1)  # and, as of any slice, from the last
        elif len(tokens) < stop:
            ids.append(0)
            carry_rows.append(end - 1)
            carry_slots.append(piece.slot)
        positions += range(start, stop)
        sample_rows += [end - 1] * len(piece.samples)
        starts.append(end)
        contexts.append(stop)
    return lists
