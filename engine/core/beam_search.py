"""Beam search as arithmetic: which beams go on with which token, which answers are finished, and when the search is over.

The rules are those of transformers' `generate`, so that a search finds the same answers with the same scores. The width
best of all continuations count: of these, those that end are finished answers; the width best that do not end are the
next beams. A finished answer's score is the sum of its tokens' log probabilities, its end token's included, divided by
their number to the power of length_penalty. The search is over when max_tokens are reached, or when there are `width`
finished answers and early_stopping says that this is enough.

Pure numbers: knows neither sequences nor blocks. One object a request, on the engine thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from heapq import nsmallest
from operator import attrgetter
from typing import NamedTuple

from engine.core.types import BeamParams, EarlyStopping, FinishReason, SamplingParams, TokenLogprob

Top = tuple[tuple[int, float], ...]  # the likeliest next tokens and their log probabilities, best first


class Continuation(NamedTuple):
    """What one beam is next: what another, perhaps itself, is now, and one more token."""

    parent: int
    token: int


class Trace(NamedTuple):
    """The last token of a beam, and what came before it: beams share their common beginnings."""

    token: int
    logprob: float
    top: Top  # that it was chosen from
    before: Trace | None


class Answer(NamedTuple):
    """A finished one."""

    score: float
    trace: Trace
    reason: FinishReason

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """Token by token."""
        entries: list[TokenLogprob] = []
        trace: Trace | None = self.trace
        while trace is not None:
            rank = 1 + sum(logprob > trace.logprob for _, logprob in trace.top)
            entries.append(TokenLogprob(trace.token, trace.logprob, rank, trace.top))
            trace = trace.before
        return entries[::-1]


class _Candidate(NamedTuple):
    """Smaller is better; of equals the one of the first beam."""

    negative_sum: float  # of log probabilities
    parent: int
    rank: int  # among its parent's
    token: int
    logprob: float


def row_params(params: SamplingParams) -> SamplingParams:
    """What a runner is asked for each beam: its likeliest tokens, enough that `width` of them end nothing."""
    assert params.beam is not None
    num_needed = params.beam.width + len(params.eos_token_ids | params.stop_token_ids)
    return replace(params, temperature=0.0, logprobs=max(num_needed, params.logprobs or 0))


class BeamSearch:
    """Starts with one beam, the prompt; from the first step on there are `width`."""

    def __init__(self, params: SamplingParams) -> None:
        assert params.beam is not None
        self._beam: BeamParams = params.beam
        self._max_tokens, self._min_tokens = params.max_tokens, params.min_tokens
        self._ending_ids = params.eos_token_ids | params.stop_token_ids
        self._traces: list[Trace | None] = [None]
        self._sums = [0.0]
        self._length = 0  # tokens of each beam
        self._tops: dict[int, Top] = {}  # of those beams whose next tokens are known
        self.finished: list[Answer] = []  # best first

    @property
    def width(self) -> int:
        return self._beam.width

    def put(self, beam: int, top: Top) -> bool:
        """Take in a beam's likeliest next tokens; True if all beams' are known now, and `advance` is due."""
        self._tops[beam] = top
        return len(self._tops) == len(self._sums)

    def advance(self) -> list[Continuation]:
        """The next beams, each in its place; empty when the search is over.

        A beam that goes on does so in its own place, with the best of its continuations. The others take the places of
        beams that end here.
        """
        width, is_last = self._beam.width, self._length + 1 == self._max_tokens
        candidates = self._candidates()
        self._length += 1
        going_on: list[_Candidate] = []
        for place, candidate in enumerate(candidates):
            ends = candidate.token in self._ending_ids
            if (ends or is_last) and place < width:
                self._finish(candidate, FinishReason.STOP if ends else FinishReason.LENGTH)
            elif not ends:
                going_on.append(candidate)
        going_on = going_on[:width]
        if is_last or self._is_settled(going_on[0].negative_sum):
            return []
        assert len(going_on) == width, "a runner has told too few tokens"
        return self._go_on(_in_places(going_on))

    def _candidates(self) -> list[_Candidate]:
        """The best continuations of all beams, as many as can matter."""
        is_too_short = self._length < self._min_tokens
        candidates = [
            _Candidate(-(self._sums[beam] + logprob), beam, rank, token, logprob)
            for beam, top in self._tops.items()
            for rank, (token, logprob) in enumerate(top)
            if not (is_too_short and token in self._ending_ids)
        ]
        # Each beam can end in as many ways as there are ending tokens, and what is left are enough to go on with.
        return nsmallest(self._beam.width * (1 + len(self._ending_ids)), candidates)

    def _finish(self, candidate: _Candidate, reason: FinishReason) -> None:
        answer = Answer(self._score(-candidate.negative_sum, self._length), self._trace(candidate), reason)
        self.finished.append(answer)
        self.finished.sort(key=attrgetter("score"), reverse=True)
        del self.finished[self._beam.width :]

    def _is_settled(self, best_negative_sum: float) -> bool:
        """True if there are enough answers, and no better ones to be hoped for."""
        if len(self.finished) < self._beam.width:
            return False
        if self._beam.early_stopping is EarlyStopping.YES:
            return True
        hopes_long = self._beam.early_stopping is EarlyStopping.NEVER and self._beam.length_penalty > 0
        best_possible = self._score(-best_negative_sum, self._max_tokens if hopes_long else self._length)
        return best_possible <= self.finished[-1].score

    def _go_on(self, places: Sequence[_Candidate]) -> list[Continuation]:
        self._traces = [self._trace(candidate) for candidate in places]
        self._sums = [-candidate.negative_sum for candidate in places]
        self._tops = {}
        return [Continuation(candidate.parent, candidate.token) for candidate in places]

    def _trace(self, candidate: _Candidate) -> Trace:
        parent = candidate.parent
        return Trace(candidate.token, candidate.logprob, self._tops[parent], self._traces[parent])

    def _score(self, total: float, length: int) -> float:
        return total / math.pow(length, self._beam.length_penalty)


def _in_places(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """Each parent's best in the parent's own place, the others where nobody goes on."""
    staying: dict[int, _Candidate] = {}
    moving: list[_Candidate] = []
    for candidate in candidates:
        if candidate.parent in staying:
            moving.append(candidate)
        else:
            staying[candidate.parent] = candidate
    rest = iter(moving)
    return [staying[place] if place in staying else next(rest) for place in range(len(candidates))]
