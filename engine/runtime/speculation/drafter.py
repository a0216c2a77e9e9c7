"""Speculation in a runner: drafted tokens are computed together with the known one.

    plan.drafts -> drafter -> rows of one step -> a draw after each -> the accepted ones (step.Drafted)

A draw is a function of logits, parameters, seed and position. So a draw after a correct draft is the token that a later
step would have drawn. The answer is the same with and without speculation, sampled or greedy; a draft can only cost
time. Engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.core.rows import SequenceSlice
from engine.core.step import Drafted, Fault, StepPlan, StepResult, count_agreeing


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
        """See Drafter."""
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
