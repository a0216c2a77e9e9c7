"""The rows that a runner computes: their ids and parameters, which plans do not repeat.

A plan names slots and positions. `Rows` keeps, by slot, what a row began with and the ids drawn since, and makes slices
of both: one for each sequence of a step, with the ids known so far. Blocks are not here: a runner keeps its tables in the
form that its memory needs. Engine thread.
"""

from __future__ import annotations

from collections import abc
from typing import NamedTuple

from engine.core.step import KnownId, Sample, StepPlan, StepResult
from engine.core.types import Params, Pooling, PoolingParams, SamplingParams


class SequenceSlice(NamedTuple):
    """The part of one sequence that a step computes: positions start .. start + num_tokens - 1.

    `tokens` are the row's ids, which grow; if the last position's id is not among them, the step before draws it.
    """

    slot: int
    seq_id: int
    num_prompt: int
    params: Params
    tokens: list[int]
    samples: tuple[Sample, ...]
    start: int
    num_tokens: int
    prompt_logprobs: int = -1
    drafts: abc.Sequence[int] = ()  # ids supposed to follow `tokens`, the last positions of the slice
    forks: tuple[list[int], ...] = ()  # `tokens` of the rows that its further samples are for

    def at(self, start: int, num_tokens: int = 1) -> SequenceSlice:
        """Return this slice with other positions."""
        return self._replace(start=start, num_tokens=num_tokens)

    @property
    def sampling(self) -> SamplingParams:
        """Return the parameters of a slice that is drawn from."""
        return self.params  # type: ignore[return-value] # what is pooled has no samples

    @property
    def pooled_positions(self) -> range:
        """Return the positions within the slice whose hidden states are wanted."""
        if not isinstance(self.params, PoolingParams):
            return range(0)
        if self.params.pooling is Pooling.MEAN:
            return range(self.num_tokens)
        if self.params.pooling is Pooling.CLS:
            return range(int(self.start == 0))
        return range(self.num_tokens - (self.start + self.num_tokens == self.num_prompt), self.num_tokens)


_Row = tuple[int, int, int, Params, list[int]]  # the first fields of a slice


class Rows:
    """The rows of one runner. `follow` takes every plan in order, `learn` every result."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}  # by slot
        self._decodes: dict[int, tuple[int, int, int, Params, list[int], tuple[Sample, ...]]] = {}

    def begin(self, plan: StepPlan) -> None:
        """Begin the plan's rows."""
        for row in plan.rows:
            began = self._rows[row.slot] = row.slot, row.seq_id, row.num_prompt, row.params, list(row.ids)
            self._decodes[row.slot] = *began, (Sample(row.slot, row.seed),)
        for known in plan.ids:
            self._set(known)

    def texts(self, slots: abc.Iterable[int]) -> list[list[int]]:
        """Return the ids of rows, to which those that are drawn are appended."""
        return [self._rows[slot][-1] for slot in slots]

    def follow(self, plan: StepPlan) -> list[SequenceSlice]:
        """Begin rows, and return the plan's slices."""
        self.begin(plan)
        make, decodes = tuple.__new__, self._decodes  # a tenth of a microsecond a slice
        slices = [
            make(SequenceSlice, (*decodes[slot], start, 1, -1, (), ()))
            for slot, start in zip(plan.slots, plan.positions, strict=True)
        ]
        for slot, start, num_tokens, samples, prompt_logprobs in plan.chunks:
            forks = tuple([self._rows[sample.slot][-1] for sample in samples if sample.slot != slot])
            slices.append(SequenceSlice(*self._rows[slot], samples, start, num_tokens, prompt_logprobs, (), forks))
        return slices

    def _set(self, known: KnownId) -> None:
        self._rows[known.slot][-1][known.position :] = [known.token_id]

    def learn(self, slices: abc.Iterable[SequenceSlice], result: StepResult) -> None:
        """Take in the ids that a step drew; of a row that has failed they do not matter."""
        drawn = iter(result.token_ids)
        for index, piece in enumerate(slices):
            if index in result.drafted:
                next(drawn)
                piece.tokens.extend(result.drafted[index].token_ids)
                continue
            # Of a step that was rolled back the rows have begun again, with other lists.
            forks = iter(piece.forks)
            for slot, _ in piece.samples:
                (piece.tokens if slot == piece.slot else next(forks)).append(next(drawn))
