"""Drafts by a head: a few layers over the target's states, which predict the token after next.

A head's keys and values are stored for the batch of every step, after its draws, with the tokens shifted by one: the row of
position p gets the target's state at p and the token at p + 1, which is the next row's, the prompt's, or the one that was
just drawn. Its layers follow the target's in the pool, so its K/V are copied, shared, swapped and offloaded with the
target's: a block that holds the one holds the other. K/V of rejected drafts are overwritten with the target's.

The rest of a head runs for sequences that draft: the target's states of the rows that were drawn from are kept by slot. A
step's first drafts begin with that of the last position but one and the last token; for each further draft the head reads
what it drew, and its previous state in place of the target's.

Where no draft has paid for a while nothing is stored, and a step costs what it does without a head. Later drafts attend
from the first block on that has no gap behind it.

Four things make a draft worse, and never change an answer. Where a prompt has several answers, or sequences share a
prefix, the last shared position was computed with one of the tokens that follow. Adapters do not change a head. After a
swap, and for the further answers to a prompt, a sequence has no state and gets no drafts for one step. Blocks that were
swapped or come from elsewhere count as known, although they may have gaps.

On CUDA all steps of an engine with a head are launched kernel by kernel: a graph would have to contain the head and the
rows of drafts. Other drafters leave steps without drafts to graphs. Engine thread.

A new kind of head is a class with the members of `Head`, made in engine/startup/speculation.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.core.config import SchedulerConfig
from engine.core.rows import SequenceSlice
from engine.core.step import StepPlan
from engine.runtime.attention.backend import Batch
from engine.runtime.kv_layout import StateSpec
from engine.runtime.layers.parts import LayerStates
from engine.runtime.native.decoder import Streams
from engine.runtime.pool.batch import BatchBuilder
from engine.runtime.pool.kv_cache import KVCache
from engine.runtime.pool.row_tables import RowTables
from engine.runtime.sampling.draw import draw
from engine.runtime.sampling.sampler import wishes
from engine.runtime.speculation.drafter import KnownPositions, draft_by_depth
from engine.runtime.transfer import to_device

_MOST_IDLE = 8  # steps with decodes and without drafts, one after the other, after which nothing is stored


class Head(Protocol):
    """Layers that predict the token at p + 2 from the target's state at p and the token at p + 1."""

    streams: Sequence[int]  # the target's streams that it reads, see native/decoder.py; none: final normed states
    needs_all: bool  # it reads the final states, or the stream after the last layer, of all rows
    states: Sequence[StateSpec]  # of its layers, in the pool behind the target's
    target_hidden_size: int  # of a stream
    hidden_size: int  # of its states
    dtype: torch.dtype

    def project(self, states: Tensor) -> Tensor:
        """Return [T, hidden] of the target's states [T, hidden], or of its streams [T, number * target's hidden]."""

    def forward(self, ids: Tensor, positions: Tensor, states: Tensor, attention: LayerStates) -> Tensor:
        """Return the states [T, hidden] that the next draft reads.

        `ids` [T] are the tokens at positions + 1, `states` [T, hidden] projected ones or a previous result.
        `attention` counts its layers from the target's on.
        """

    def store(self, ids: Tensor, positions: Tensor, states: Tensor, attention: LayerStates) -> None:
        """Store the keys and values of projected states alone; see `forward`."""

    def logits(self, states: Tensor) -> Tensor:
        """Return float32 logits [R, the target's vocab_size] of states that `forward` returned."""


class _Kept(NamedTuple):
    """The states that are kept of a slot: of whose, from which position on, and how many."""

    seq_id: int
    first: int
    num: int


class HeadDrafter:
    """A Drafter with a head; the runner makes it, and calls `observe` after every step's draws."""

    def __init__(
        self,
        head: Head,
        kv_cache: KVCache,
        config: SchedulerConfig,
        device: torch.device,
        tables: RowTables,
    ) -> None:
        """The pool ends with the head's layers; pool and tables are the target's."""
        self._head, self._kv_cache, self._device = head, kv_cache, device
        self._batches = BatchBuilder(replace(config, state_blocks=0), device, tables)  # its layers attend
        self._num_rows = 1 + config.num_speculative_tokens  # that a slot draws from in a step
        shape = (config.max_num_seqs * self._num_rows, head.hidden_size)
        self._states = torch.zeros(shape, dtype=head.dtype, device=device)
        self._kept: dict[int, _Kept] = {}  # by slot
        self._no_ids = torch.zeros(config.max_num_seqs + 1, dtype=torch.int64, device=device)
        self._known = KnownPositions(config, tables, travels=True)
        self._num_idle = 0  # last steps that had decodes and no drafts

    @property
    def is_idle(self) -> bool:
        """Return whether no draft has paid for a while, so that steps need not be observed."""
        return self._num_idle > _MOST_IDLE

    def rest(self) -> None:
        """Be idle until a prompt or drafts come."""
        self._num_idle = _MOST_IDLE + 1

    @property
    def needs_all(self) -> bool:
        """Return whether the target's last layer must compute all rows."""
        return self._head.needs_all

    def new_streams(self, like: Tensor) -> Streams | None:
        """Return memory for the streams of a step whose tokens are `like`, if the head reads any."""
        layers = self._head.streams
        if not layers:
            return None
        width = self._head.target_hidden_size
        return Streams(layers, torch.empty(len(like), len(layers), width, dtype=self._head.dtype, device=self._device))

    def observe(self, slices: Sequence[SequenceSlice], batch: Batch, states: Tensor, drawn: Tensor | None) -> None:
        """Store a step for later drafts: the target's states [T, ...] and the ids that were drawn, in plan order.

        The pool is still prepared for the batch.
        """
        following, rows, places = self._follow(slices, batch, drawn)
        states = self._head.project(states)
        self._head.store(following, batch.positions, states, self._kv_cache)
        if rows:
            at = to_device([places, rows], torch.int64, self._device)
            self._states.index_copy_(0, at[0], states.index_select(0, at[1]))

    def _follow(
        self, slices: Sequence[SequenceSlice], batch: Batch, drawn: Tensor | None
    ) -> tuple[Tensor, list[int], list[int]]:
        """Return the token after each row, the rows that were drawn from, and the places of their states."""
        num_tokens, num_drawn = len(batch.ids), 0 if drawn is None else len(drawn)
        sources: list[int] = []  # by row: an index into the batch's ids, the drawn ones, and `others`
        others: list[int] = []
        rows: list[int] = []
        places: list[int] = []
        end, first_draw = 0, num_tokens
        for piece in slices:
            begin, end, stop = end, end + piece.num_tokens, piece.start + piece.num_tokens
            self._known.note(piece.slot, piece.start, stop)
            if piece.samples:
                own = range(end - 1 - len(piece.drafts), end)
                sources += range(begin + 1, own.start + 1)
                sources += range(first_draw, first_draw + len(own))
                first_draw += len(piece.samples) + len(piece.drafts)
                rows += own
                place = piece.slot * self._num_rows
                places += range(place, place + len(own))
                self._kept[piece.slot] = _Kept(piece.seq_id, stop - len(own), len(own))
                continue
            sources += range(begin + 1, end)
            if stop < len(piece.tokens):  # a chunk of a prompt
                sources.append(num_tokens + num_drawn + len(others))
                others.append(piece.tokens[stop])
            else:
                sources.append(end - 1)
        parts = [batch.ids] if drawn is None else [batch.ids, drawn]
        if others:
            parts.append(to_device(others, torch.int64, self._device))
        return torch.cat(parts).index_select(0, to_device(sources, torch.int64, self._device)), rows, places

    @torch.inference_mode()
    def draft(self, plan: StepPlan, slices: Sequence[SequenceSlice]) -> dict[int, list[int]]:
        """See Drafter; a sequence without the state of its last position gets no drafts."""
        self._known.follow(plan, slices)
        self._num_idle = 0 if plan.drafts or not plan.slots else self._num_idle + 1
        rows = {index: self._row_before(slices[index]) for index, _ in plan.drafts}
        # Those that want most are first, so that the ones that go on are always the first rows.
        wanted = sorted(plan.drafts, key=lambda each: -each[1])
        asked = {index: num for index, num in wanted if rows[index] is not None}
        if not asked:
            return {}
        states = self._states.index_select(0, to_device([rows[i] for i in asked], torch.int64, self._device))
        ids = to_device([slices[index].tokens[slices[index].start] for index in asked], torch.int64, self._device)
        firsts = [self._known.first_block(slices[index].slot, slices[index].start - 1) or 0 for index in asked]

        def draw_next(depth: int, going: Sequence[int]) -> Tensor:
            nonlocal states, ids
            behind = [slices[index].at(slices[index].start + depth - 1) for index in going]
            batch = self._batches.build(behind, self._no_ids, firsts[: len(going)])
            self._kv_cache.prepare(batch)
            states = self._head.forward(ids[: len(going)], batch.positions, states[: len(going)], self._kv_cache)
            pieces = [slices[index].at(slices[index].start + depth) for index in going]
            ids = draw(self._head.logits(states), wishes(pieces)).ids
            return ids

        return draft_by_depth(asked, draw_next)

    def _row_before(self, piece: SequenceSlice) -> int | None:
        """Return where the state before a slice's one position is kept, if it is and the head can attend from there."""
        kept = self._kept.get(piece.slot)
        if kept is None or kept.seq_id != piece.seq_id or self._known.first_block(piece.slot, piece.start - 1) is None:
            return None
        at = piece.start - 1 - kept.first
        return piece.slot * self._num_rows + at if 0 <= at < kept.num else None

    def forget(self, blocks: Sequence[int]) -> None:
        """See Drafter; blocks from elsewhere hold the head's K/V, too."""
        self._known.bring(blocks)

    def close(self) -> None:
        """Release weights and states."""
        del self._head, self._kv_cache, self._states
