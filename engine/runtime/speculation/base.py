"""Speculation in a runner: tokens that are supposed to come are computed together with the one that is certain.

    plan.num_drafts -> drafter -> rows of one step -> a draw behind each -> those that stand (plan.Drafted)

A draw is a function of logits, parameters, seed and position. So a draw behind a right draft is the very token that a
later step would have drawn, and what is drawn is the same with and without speculation, sampled or greedy: a draft can
only cost time. Engine thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from engine.core.step import Drafted, Fault, SequenceSlice, StepPlan, StepResult, count_agreeing


class Drafter(Protocol):
    """Guesses what comes next."""

    def draft(self, plan: StepPlan) -> dict[int, list[int]]:
        """Tokens that may follow a slice, by slice index, at most as many as `plan.num_drafts` has room for.

        Called with every plan, in order, once its blocks have moved: one that keeps K/V of its own has to follow.
        """
        ...

    def forget(self, blocks: Sequence[int]) -> None:
        """These hold other tokens from now on, whose K/V came from elsewhere."""
        ...

    def close(self) -> None:
        """Give back memory."""
        ...


def with_drafts(plan: StepPlan, drafts: Mapping[int, Sequence[int]]) -> StepPlan:
    """The plan of what is really computed: slices with their drafts."""
    slices = list(plan.slices)
    for index, tokens in drafts.items():
        piece = slices[index]
        slices[index] = replace(piece, num_tokens=piece.num_tokens + len(tokens), drafts=tokens)
    num_drafts = {index: len(tokens) for index, tokens in drafts.items()}
    more = sum(num_drafts.values())
    return plan._replace(
        slices=slices, num_tokens=plan.num_tokens + more, num_samples=plan.num_samples + more, num_drafts=num_drafts
    )


class Shape(NamedTuple):
    """How many draws a slice has, and its drafts: what is to be known of it when the draws are there."""

    num_samples: int
    drafts: Sequence[int]

    @classmethod
    def of(cls, piece: SequenceSlice) -> Shape:
        return cls(len(piece.samples), piece.drafts)

    @property
    def num_rows(self) -> int:
        return self.num_samples + len(self.drafts)


def fold(rows: StepResult, faults: Mapping[int, Fault], shapes: Sequence[Shape]) -> StepResult:
    """The result of a plan with drafts from what was found row by row: a row of a slice with drafts is a draw behind
    what is certain or behind a draft, every other row is a sample's. `faults` are by row."""
    result = StepResult(token_ids=[], prompt_logprobs=rows.prompt_logprobs, pooled=rows.pooled)
    logprobs, ended, errors, drafted = {}, [], dict(rows.errors), {}
    first = 0
    for index, shape in enumerate(shapes):
        own = range(first, first + shape.num_rows)
        first = own.stop
        fault = next((row for row in own if row in faults), None)
        if shape.drafts:
            # Whoever fails behind a draft does so when it comes first in a step; and alone, since what is not a finite
            # number among keys and values may reach the rows before it.
            stop = min([own.stop, *(row + 1 for row in own if row in rows.ended), *([] if fault is None else [fault])])
            drafted[index] = _stand(rows, range(own.start, stop), shape.drafts)
        elif fault is not None:
            errors[index] = faults[fault]
        for row in own[: shape.num_samples]:
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
