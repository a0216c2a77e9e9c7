"""Speculation in a runner: drafted tokens are computed together with the known one.

    plan.drafts -> drafter -> rows of one step -> a draw after each -> the accepted ones (step.Drafted)

A draw is a function of logits, parameters, seed and position. So a draw after a correct draft is the token that a later
step would have drawn. The answer is the same with and without speculation, sampled or greedy; a draft can only cost
time. Engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.config import SchedulerConfig
from engine.core.rows import SequenceSlice
from engine.core.step import Drafted, Fault, StepPlan, StepResult, count_agreeing
from engine.runtime.pool.row_tables import RowTables


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


class Drafter(Protocol):
    """Predicts the next tokens."""

    def draft(self, plan: StepPlan, slices: Sequence[SequenceSlice]) -> dict[int, list[int]]:
        """Return drafts by slice index, at most as many as `plan.drafts` allows.

        Called with every plan and its slices, in order, after its blocks have moved, so that a drafter with K/V can follow.
        """

    def forget(self, blocks: Sequence[int]) -> None:
        """Forget these blocks: they hold other tokens now, whose K/V came from elsewhere."""

    def close(self) -> None:
        """Give back memory."""


class UpToLength:
    """Drafts by another drafter, of sequences up to a length."""

    def __init__(self, drafter: Drafter, max_len: int) -> None:
        self._drafter, self._max_len = drafter, max_len
        self.forget, self.close = drafter.forget, drafter.close

    def draft(self, plan: StepPlan, slices: Sequence[SequenceSlice]) -> dict[int, list[int]]:
        pieces = [slices[index] for index, _ in plan.drafts]
        ends = [piece.start + piece.num_tokens + num for piece, (_, num) in zip(pieces, plan.drafts, strict=True)]
        short = tuple([each for each, end in zip(plan.drafts, ends, strict=True) if end <= self._max_len])
        return self._drafter.draft(plan._replace(drafts=short), slices)


def draft_by_depth(asked: Mapping[int, int], draw: Callable[[int, Sequence[int]], Tensor]) -> dict[int, list[int]]:
    """Return the drafts of slices that ask for a number of them, one depth after the other.

    `draw` gets a depth, from 0, and the slices that go so deep, in the order of `asked`; it returns their ids.
    """
    columns = [[index for index, num in asked.items() if num > depth] for depth in range(max(asked.values()))]
    steps = [draw(depth, going) for depth, going in enumerate(columns)]
    drafts: dict[int, list[int]] = {index: [] for index in asked}
    for ids, indices in zip(torch.cat(steps).split([len(each) for each in columns]), columns, strict=True):
        for index, token in zip(indices, ids.tolist(), strict=True):
            drafts[index].append(token)
    return drafts


def with_drafts(slices: Sequence[SequenceSlice], drafts: Mapping[int, Sequence[int]]) -> list[SequenceSlice]:
    """Return the slices that are computed, with their drafts."""
    found = list(slices)
    for index, tokens in drafts.items():
        found[index] = found[index]._replace(num_tokens=found[index].num_tokens + len(tokens), drafts=tokens)
    return found


def fold(rows: StepResult, faults: Mapping[int, Fault], slices: Sequence[SequenceSlice]) -> StepResult:
    """Return a plan's result from the results of its rows; `faults` are by row.

    A row of a slice with drafts is a draw after the known token or after a draft; every other row is a sample.
    """
    result = StepResult(token_ids=[], prompt_logprobs=rows.prompt_logprobs, pooled=rows.pooled)
    logprobs, ended, errors, drafted = {}, [], dict(rows.errors), {}
    first = 0
    for index, piece in enumerate(slices):
        own = range(first, first + len(piece.samples) + len(piece.drafts))
        first = own.stop
        fault = next((row for row in own if row in faults), None)
        if piece.drafts:
            # A failure after a draft is reported when the token is the first of a step, and alone: values that are not
            # finite may reach the rows before it.
            stop = min([own.stop, *(row + 1 for row in own if row in rows.ended), *([] if fault is None else [fault])])
            drafted[index] = _stand(rows, range(own.start, stop), piece.drafts)
        elif fault is not None:
            errors[index] = faults[fault]
        for row in own[: len(piece.samples)]:
            if row in rows.logprobs:
                logprobs[len(result.token_ids)] = rows.logprobs[row]
            if row in rows.ended:
                ended.append(len(result.token_ids))
            result.token_ids.append(rows.token_ids[row])
    result.logprobs, result.ended, result.errors, result.drafted = logprobs, ended, errors, drafted
    return result


def _stand(rows: StepResult, own: range, drafts: Sequence[int]) -> Drafted:
    drawn = rows.token_ids[own.start : own.stop]
    token_ids = drawn[: count_agreeing(drawn, drafts)]
    own = own[: len(token_ids)]
    if not own:
        return Drafted((), len(drafts))
    logprobs = tuple([rows.logprobs[row] for row in own]) if own[0] in rows.logprobs else None
    return Drafted(token_ids, len(drafts), logprobs, own[-1] in rows.ended)
