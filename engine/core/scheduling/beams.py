"""Beam search: the next tokens, the finished answers, and the end of a search.

The rules are those of transformers' `generate`, so that a search finds the same answers with the same scores. Of the
`width` best continuations, those that end are finished answers. The `width` best continuations that do not end are the
next beams. A finished answer's score is the sum of its tokens' log probabilities, its end token's included, divided by
their number to the power of length_penalty. The search is over when max_tokens are reached, or when there are `width`
finished answers and early_stopping says that this is enough.

Beams wait for each other, so no step in flight names one when it continues another. Engine thread.
"""

from __future__ import annotations

import math
from collections import abc
from dataclasses import replace
from heapq import nsmallest
from operator import attrgetter
from typing import NamedTuple

from engine.core.kv.manager import KVCacheManager
from engine.core.page_table import blocks_for
from engine.core.scheduling.running import RunningQueue
from engine.core.scheduling.stats_recorder import StatsRecorder
from engine.core.sequence import Sequence
from engine.core.types import BeamParams, EarlyStopping, FinishReason, SamplingParams, TokenEvent, TokenLogprob

Top = tuple[tuple[int, float], ...]  # the likeliest next tokens and their log probabilities, best first


class Continuation(NamedTuple):
    """A beam's next state: that of the parent, perhaps itself, and one more token."""

    parent: int
    token: int


class Trace(NamedTuple):
    """The last token of a beam, and the trace before it: beams share their common beginnings."""

    token: int
    logprob: float
    top: Top  # that it was chosen from
    before: Trace | None


class Answer(NamedTuple):
    """A finished answer."""

    score: float
    trace: Trace
    reason: FinishReason

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """Return the log probabilities of its tokens."""
        entries: list[TokenLogprob] = []
        trace: Trace | None = self.trace
        while trace is not None:
            rank = 1 + sum(logprob > trace.logprob for _, logprob in trace.top)
            entries.append(TokenLogprob(trace.token, trace.logprob, rank, trace.top))
            trace = trace.before
        return entries[::-1]


class _Candidate(NamedTuple):
    """One continuation. Smaller is better; of equals, the first beam's."""

    negative_sum: float  # of log probabilities
    parent: int
    rank: int  # among its parent's
    token: int
    logprob: float


def row_params(params: SamplingParams) -> SamplingParams:
    """Return a beam's parameters for the runner: `width` of the tokens do not end it."""
    assert params.beam is not None
    num_needed = params.beam.width + len(params.eos_token_ids | params.stop_token_ids)
    return replace(params, temperature=0.0, logprobs=max(num_needed, params.logprobs or 0))


class BeamSearch:
    """One search. It starts with one beam, the prompt; after the first step there are `width`."""

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
        """Take in a beam's likeliest next tokens; returns whether `advance` is due."""
        self._tops[beam] = top
        return len(self._tops) == len(self._sums)

    def advance(self) -> list[Continuation]:
        """Return the next beams, each in its place; none when the search is over.

        A beam that continues keeps its place. Its other continuations take the places of beams that end here.
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
        assert len(going_on) == width, "a runner reported too few tokens"
        return self._go_on(_in_places(going_on))

    def _candidates(self) -> list[_Candidate]:
        """Return the best continuations of all beams, as many as can matter."""
        is_too_short = self._length < self._min_tokens
        candidates = [
            _Candidate(-(self._sums[beam] + logprob), beam, rank, token, logprob)
            for beam, top in self._tops.items()
            for rank, (token, logprob) in enumerate(top)
            if not (is_too_short and token in self._ending_ids)
        ]
        # Each beam can end in as many ways as there are ending tokens; the rest are enough for the next beams.
        return nsmallest(self._beam.width * (1 + len(self._ending_ids)), candidates)

    def _finish(self, candidate: _Candidate, reason: FinishReason) -> None:
        answer = Answer(self._score(-candidate.negative_sum, self._length), self._trace(candidate), reason)
        self.finished.append(answer)
        self.finished.sort(key=attrgetter("score"), reverse=True)
        del self.finished[self._beam.width :]

    def _is_settled(self, best_negative_sum: float) -> bool:
        """Return whether there are enough answers, and no other can be better."""
        if len(self.finished) < self._beam.width:
            return False
        if self._beam.early_stopping is EarlyStopping.YES:
            return True
        hopes_long = self._beam.early_stopping is EarlyStopping.NEVER and self._beam.length_penalty > 0
        best_possible = self._score(-best_negative_sum, self._max_tokens if hopes_long else self._length)
        return best_possible <= self.finished[-1].score

    def _go_on(self, places: abc.Sequence[_Candidate]) -> list[Continuation]:
        self._traces = [self._trace(candidate) for candidate in places]
        self._sums = [-candidate.negative_sum for candidate in places]
        self._tops = {}
        return [Continuation(candidate.parent, candidate.token) for candidate in places]

    def _trace(self, candidate: _Candidate) -> Trace:
        parent = candidate.parent
        return Trace(candidate.token, candidate.logprob, self._tops[parent], self._traces[parent])

    def _score(self, total: float, length: int) -> float:
        return total / math.pow(length, self._beam.length_penalty)


def _in_places(candidates: abc.Sequence[_Candidate]) -> list[_Candidate]:
    """Return the candidates in places: each parent's best stays, the others fill the rest."""
    staying: dict[int, _Candidate] = {}
    moving: list[_Candidate] = []
    for candidate in candidates:
        if candidate.parent in staying:
            moving.append(candidate)
        else:
            staying[candidate.parent] = candidate
    rest = iter(moving)
    return [staying[place] if place in staying else next(rest) for place in range(len(candidates))]


class BeamGroup:
    """The beams of one search as sequences; the first is the request's own, and reports all events.

    A beam's max_total is one more than the tokens it has, so it waits until the tokens of all beams are known.
    """

    __slots__ = ("_params", "headroom", "members", "search")

    def __init__(self, first: Sequence) -> None:
        self.members = [first]
        self.headroom = 0
        assert isinstance(first.request.params, SamplingParams), "nothing else is searched"
        self._params = first.request.params
        first.params, first.beam_group = row_params(self._params), self
        self._begin()

    def _begin(self) -> None:
        first = self.members[0]
        self.search = BeamSearch(self._params)
        first.tokens = list(first.request.prompt)
        first.max_total = first.num_prompt + 1
        first.kv.chain = first.first_names.copy()

    def restart(self, seq_id: int) -> None:
        """Forget all tokens, so that the search can start again from the prompt."""
        self._begin()
        self.members[0].seq_id = seq_id

    def disband(self) -> list[Sequence]:
        """Remove and return all beams but the first; a restart needs room for all of them."""
        first, others = self.members[0], self.members[1:]
        held = {block for beam in self.members for table in beam.kv.held for block in table}
        self.headroom = max(len(held) - blocks_for(first.num_prompt, first.kv.block_size), 0)
        del self.members[1:]
        return others

    def add_beam(self, slot: int, seq_id: int) -> Sequence:
        """Return a new beam, without tokens: the caller has it follow another."""
        first = self.members[0]
        beam = first.sibling(first.choice, seq_id)
        beam.params, beam.beam_group = first.params, self
        beam.order = (*first.order, len(self.members))
        beam.place = (first.is_background, *beam.order)
        beam.take_slots([slot])
        self.members.append(beam)
        return beam


class BeamSearches:
    """Advances a search once the next tokens of all of its beams are known."""

    def __init__(self, kv: KVCacheManager, queue: RunningQueue, recorder: StatsRecorder) -> None:
        self._kv, self._queue, self._recorder = kv, queue, recorder

    def accept(self, seq: Sequence, entry: TokenLogprob, now: float) -> list[TokenEvent] | None:
        """Take in a beam's likeliest tokens; returns None while those of other beams are missing.

        When the search is over, returns its answers as events, best first; else an empty list.
        """
        group = seq.beam_group
        assert isinstance(group, BeamGroup)
        if not group.search.put(group.members.index(seq), entry.top):
            return None
        first = group.members[0]
        if first.history.first_token_s < 0:
            first.history.first_token_s = now
            self._recorder.prompt_computed(first, now)
        if continuations := group.search.advance():
            self._go_on(group, continuations)
            return []
        return self._answers(group.search, first, now)

    def _go_on(self, group: BeamGroup, continuations: abc.Sequence[Continuation]) -> None:
        """Give every beam its next token; a beam that continues another shares its blocks."""
        beams = group.members
        if len(beams) < len(continuations):
            slots = beams[0].kv.slots
            beams[0].take_slots(slots[:1])
            for slot in slots[1:]:
                self._queue.start(group.add_beam(slot, self._queue.take_seq_id()))
        # A beam that others follow stays in its own place, and all follow before any gets a token.
        for place, continuation in enumerate(continuations):
            if continuation.parent != place:
                self._kv.reassign(beams[place], beams[continuation.parent], self._queue.take_seq_id())
        for beam, continuation in zip(beams, continuations, strict=True):
            beam.tokens.append(continuation.token)
            beam.max_total = len(beam.tokens) + 1

    def _answers(self, search: BeamSearch, first: Sequence, now: float) -> list[TokenEvent]:
        """Return the n best answers as events."""
        asked = first.request.params
        events = []
        for choice, answer in enumerate(search.finished[: asked.n]):
            entries = answer.logprobs
            last = entries[-1].token_id
            is_stop_token = answer.reason is FinishReason.STOP and last in asked.stop_token_ids - asked.eos_token_ids
            logprobs = None
            if asked.logprobs is not None:
                logprobs = tuple([entry._replace(top=entry.top[: asked.logprobs]) for entry in entries])
            events.append(
                TokenEvent(
                    request_id=first.request_id,
                    choice=choice,
                    token_ids=tuple([entry.token_id for entry in entries]),
                    logprobs=logprobs,
                    finish_reason=answer.reason,
                    stop_reason=last if is_stop_token else None,
                    prompt=first.prompt_info(),
                    timings=self._recorder.found(first, answer.reason, len(entries), now),
                )
            )
        return events
