"""Limits the tokens and seconds of a step. Engine thread.

A prompt that fits one step delays running sequences once. All prompts of a step together take at most MOST_S beside
decodes. A long prompt is paced, because each of its steps delays running sequences:

    beside others    SHARE * n * n of what the step takes without long prompts, where n are running, or wait for what they
                     share; if one has images, at least as much as work on an image takes beside so many streams
    alone            ALONE * n times the fixed cost of a step: a request that arrives waits for the step that runs

With a target ITL, all prompts of a step share the time it leaves, and nothing else holds them back. With a target TTFT,
a long prompt takes the time it needs to meet it, if it still can. Until the estimate is known, nothing is held back.

Beside streams of other models, all prompts of a step share the target's time, or SHARE of all steps; in a step without
decodes no less than its fixed cost, else that would be most of it.
"""

from __future__ import annotations

from collections import abc
from math import inf, sqrt
from operator import mul
from typing import NamedTuple

from engine.core.config import SchedulerConfig
from engine.core.sequence import Sequence
from engine.core.spans import Span, count_vectors

BACKGROUND_SHARE = 4  # a background step is this many times smaller: a request that arrives waits for its end
RESERVE = 8  # one token in so many is kept for long prompts if a long one is first: it always makes progress
SHARE = 0.32  # a step with one long prompt takes 1.32 times as long, which running streams hardly show
ALONE = 8  # fixed costs a step: the last of them is the eighth that pacing costs a prompt which runs alone
MOST_S = 1.0  # of a step beside decodes, for its prompts: the longest that a stream waits for those of others
AIM = 0.9  # of a target, and of all time if a target TTFT is at risk: steps vary by about a tenth
FLOOR = (
    1 - AIM
)  # of the time for decoding, which prompts have at least: else an unattainable target ITL would starve them
_GROWTH = 8  # after out-of-memory the limit grows by one part of so many a step: it doubles in about six steps
_DECODES_SKIPPED = 8  # one step without prompts of so many is observed: they are frequent and alike
_FORGETTING = 0.993  # weight of the past at each observed step: of fewer than 140 steps the estimate is unsteady
_LEAST_CHUNKS = 6  # steps with prompts, before the estimate is used
_NUM_SWEEPS = 8  # over the costs at each observed step: 4 leave the first estimates 5 % off, 16 take twice the time


_IMAGE = 0.6  # of a step of decodes, for an image beside so many streams: what varies makes that 1 at times
_MANY = 8
_MOST = 5  # of a step, beside fewer, whose steps cost nearly as much as theirs


def image_share(num_streams: int) -> float:
    """Return what an image may take beside streams, by its tower or by its prompt, as a part of a step of theirs.

    Many streams wait at most twice as long for their next token. Few wait longer, but no longer in all: their requests end
    as soon, and the image's request joins them sooner in steps that cost little more.
    """
    return min(_IMAGE * max(_MANY / num_streams, 1) ** 2, _MOST)


class Beside(NamedTuple):
    """What the engines of other models do, which share the cores."""

    streams_s: float  # of one step of each that has streams
    target_itl_s: float | None  # the least of all that have streams

    def prompts_s(self, base_s: float) -> float:
        """Return the seconds that prompts may take beside steps of `base_s`."""
        if self.target_itl_s is None:
            return SHARE * base_s
        return max(AIM * self.target_itl_s - base_s, FLOOR * base_s)


class Load(NamedTuple):
    """What a step computes. A context is the sum of the positions that tokens attend to."""

    num_decodes: int = 0
    decode_context: int = 0
    num_prompt_tokens: int = 0
    prompt_context: float = 0.0
    num_states: int = 0  # chunks of prompts that go on from a recurrent state; a decode costs the same with each
    num_vectors: int = 0  # prompt tokens that are vectors of spans

    def with_chunk(self, start: int, count: int, *, num_states: int = 0, num_vectors: int = 0) -> Load:
        """Return this load and `count` positions of a prompt from `start`."""
        return self._replace(
            num_prompt_tokens=self.num_prompt_tokens + count,
            prompt_context=self.prompt_context + count * (start + count / 2),
            num_states=self.num_states + num_states,
            num_vectors=self.num_vectors + num_vectors,
        )

    @property
    def features(self) -> tuple[float, ...]:
        """Return the factors of Costs."""
        prompts = self.prompt_context, self.num_prompt_tokens
        decodes = 1.0, self.num_decodes, self.decode_context
        return *prompts, *decodes, float(self.num_prompt_tokens > 0), self.num_states, self.num_vectors


class Costs(NamedTuple):
    """Seconds that the parts of a step take, none of them negative.

    While steps are too much alike to separate the parts, an earlier field includes the cost of a later one.
    """

    context_s: float = 0.0  # of a prompt
    token_s: float = 0.0  # of a prompt
    fixed_s: float = 0.0
    decode_s: float = 0.0
    decode_context_s: float = 0.0
    chunked_s: float = 0.0  # once, if the step has any prompt token
    state_s: float = 0.0  # of a chunk, if the model has recurrent state
    vector_s: float = 0.0  # of a prompt token that is a vector, beyond token_s


def decode_load(positions: abc.Collection[int]) -> Load:
    """Return the load of slices of one token each."""
    return Load(len(positions), sum(positions))


class StepTime:
    """An estimate of a step's duration: least squares with exponential forgetting, no cost below 0.

    An error counts relative to the step's duration, or to the estimate if that is longer: an interruption moves it little.
    """

    def __init__(self) -> None:
        self.costs = Costs()
        self._products = [[0.0] * len(self.costs) for _ in self.costs]  # of two features each, summed over past steps
        self._totals = [0.0] * len(self.costs)  # of a feature and the duration, likewise
        self._num_chunks = 0

    @property
    def is_known(self) -> bool:
        """Return whether there were enough steps with prompts to tell the costs apart."""
        return self._num_chunks >= _LEAST_CHUNKS

    def observe(self, load: Load, seconds: float) -> None:
        """Learn from a step of this load that took `seconds`."""
        if seconds <= 0:
            return
        self._num_chunks += load.num_prompt_tokens > 0
        unit = max(seconds, self.seconds(load))
        row = [feature / unit for feature in load.features]
        self._products = [
            [_FORGETTING * value + factor * other for value, other in zip(line, row, strict=True)]
            for line, factor in zip(self._products, row, strict=True)
        ]
        self._totals = [
            _FORGETTING * value + factor * seconds / unit for value, factor in zip(self._totals, row, strict=True)
        ]
        # Coordinate descent: the best value of each cost in turn, given the others. The next steps carry it on.
        costs = list(self.costs)
        for index in _NUM_SWEEPS * [index for index, factor in enumerate(row) if factor]:
            line = self._products[index]
            error = self._totals[index] - sum(map(mul, line, costs))
            costs[index] = max(costs[index] + error / line[index], 0.0)
        self.costs = Costs(*costs)

    def seconds(self, load: Load) -> float:
        """Return the expected duration of a step of this load."""
        expected: float = sum(map(mul, self.costs, load.features))
        return expected

    def chunk_s(self, start: int, count: int) -> float:
        """Return the seconds that a chunk adds to a step that has prompts already."""
        return count * (self.costs.token_s + self.costs.context_s * (start + count / 2))

    def tokens_within(self, seconds: float, start: int, each_s: float = 0.0) -> float:
        """Return how many positions can be added for `seconds`, if each takes `each_s` more than `chunk_s` says."""
        if seconds <= 0 or seconds == inf:
            return max(seconds, 0.0)
        slope = self.costs.token_s + each_s + self.costs.context_s * start
        root = slope + sqrt(slope * slope + 2 * self.costs.context_s * seconds)
        return 2 * seconds / root if root > 0 else inf


class StepBudget:
    """Sets the size of each step, and learns from its duration."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.times = StepTime()
        self.num_states = int(config.state_blocks > 0)  # of each chunk
        self._max_tokens = self._limit = config.whole_step or config.max_num_batched_tokens
        self.target_ttft_s = config.target_ttft_s
        self.beside = Beside(0.0, config.target_itl_s)
        self._num_skipped = 0  # steps without prompts since one was observed

    def limit(self, *, has_foreground: bool) -> int:
        """Return the tokens of the next step, which are fewer if it is of background work alone."""
        return self._limit if has_foreground else -(-self._limit // BACKGROUND_SHARE)

    @property
    def is_reduced(self) -> bool:
        """Return whether the limit is still lowered after the device ran out of memory."""
        return self._limit < self._max_tokens

    def out_of_memory(self, num_tokens: int) -> None:
        """Halve the next steps: the device had no memory for one of `num_tokens`."""
        self._limit = max(num_tokens // 2, 1)

    def observe(self, prompts: Load | None, positions: abc.Collection[int], num_drafts: int, seconds: float) -> None:
        """Learn from a step; `prompts` is its load, or None if all of its slices are decodes."""
        self._limit = min(self._limit + self._limit // _GROWTH + 1, self._max_tokens)
        self._num_skipped += 1
        if positions and (prompts is not None or self._num_skipped >= _DECODES_SKIPPED):
            self._num_skipped = 0
            load = prompts or decode_load(positions)
            self.times.observe(load._replace(num_decodes=load.num_decodes + num_drafts), seconds)


class Allowance:
    """The rest of one step's budget behind its decodes: tokens, and seconds if those are limited."""

    __slots__ = ("_budget", "_held_s", "_num_held", "load", "num_tokens", "seconds")

    def __init__(self, budget: StepBudget, limit: int, decodes: abc.Collection[int] = ()) -> None:
        """`decodes` are positions, of a token each."""
        self._budget = budget
        self.load = decode_load(decodes)  # what the step computes so far
        self._num_held, self._held_s = 0, 0.0
        self.num_tokens, self.seconds = limit - len(decodes), inf

    def begin_prompts(self, *, holds_back: bool) -> None:
        """Start with the prompts; `holds_back` keeps a part for long ones until `release`."""
        self.seconds = self._prompts_s()
        if holds_back:
            self._num_held = -(-self.num_tokens // RESERVE)
            if self._num_held and self.seconds < inf:
                self._held_s = self.seconds * self._num_held / self.num_tokens
            self.num_tokens -= self._num_held
            self.seconds -= self._held_s

    def release(self) -> None:
        """Give back the part that was kept."""
        self.num_tokens += self._num_held
        self.seconds += self._held_s
        self._num_held, self._held_s = 0, 0.0

    def prompt(self, start: int, wanted: int, spans: abc.Sequence[Span], least: int = 0) -> int:
        """Return how many of `wanted` positions of a prompt to compute.

        They are as many as the seconds allow, but no fewer than `least`, and at least 1 in the first chunk of a step.
        """
        times, limit = self._budget.times, min(wanted, self.num_tokens)
        if self.seconds < inf:
            least = least or not self.load.num_prompt_tokens
            seconds = self.seconds - self._budget.num_states * times.costs.state_s
            count = int(min(times.tokens_within(seconds, start), limit))
            if spans and count_vectors(spans, start, start + count):
                count = int(min(times.tokens_within(seconds, start, times.costs.vector_s), limit))
            limit = min(limit, max(count, least))
        return limit

    def take_prompt(self, start: int, count: int, spans: abc.Sequence[Span]) -> None:
        """Subtract a chunk of a prompt."""
        costs, num_vectors = self._budget.times.costs, count_vectors(spans, start, start + count) if spans else 0
        self.seconds -= self._budget.times.chunk_s(start, count)
        self.seconds -= self._budget.num_states * costs.state_s + num_vectors * costs.vector_s
        excess = max(count - self.num_tokens, 0)  # of an atomic span that is computed alone
        self._num_held = max(self._num_held - excess, 0)
        self.num_tokens += excess - count
        self.load = self.load.with_chunk(start, count, num_states=self._budget.num_states, num_vectors=num_vectors)

    def long_s(self, long: abc.Sequence[Sequence], num_followers: int, now: float) -> float:
        """Return the seconds that long prompts may take, beside decodes and short prompts; others may wait for them."""
        times, costs, others = self._budget.times, self._budget.times.costs, self.load
        num_long = len(long) + num_followers
        beside = self._budget.beside
        if not times.is_known or beside.streams_s or (others.num_decodes and beside.target_itl_s is not None):
            return self.seconds
        if not others.num_decodes and not others.num_prompt_tokens:
            return min(ALONE * num_long * (costs.fixed_s + costs.chunked_s), self.seconds)
        urgency, share = self._urgency(long, now), SHARE * num_long**2
        if others.num_decodes and any(seq.request.spans for seq in long):
            share = max(share, image_share(others.num_decodes))
        share_s = max(share, urgency / (1 - urgency)) * times.seconds(others)
        if not others.num_prompt_tokens:
            share_s = max(share_s - costs.chunked_s, costs.chunked_s)
        return min(share_s, self.seconds)

    def drafts_s(self) -> float:
        """Return the seconds that drafts may add to the step, which is otherwise complete."""
        (streams_s, target_s), times = self._budget.beside, self._budget.times
        if target_s is None or not times.is_known:
            return self.seconds
        return min(AIM * target_s - streams_s - times.seconds(self.load), self.seconds)

    def _prompts_s(self) -> float:
        """Return the seconds that prompts may take, beyond the cost of having any."""
        beside, times, decodes = self._budget.beside, self._budget.times, self.load
        has_target = beside.target_itl_s is not None and decodes.num_decodes
        if not times.is_known:
            return inf
        if not (has_target or beside.streams_s):
            return MOST_S if decodes.num_decodes else inf
        base_s = times.seconds(decodes) + times.costs.chunked_s
        return max(beside.prompts_s(base_s + beside.streams_s), 0.0 if decodes.num_decodes else base_s)

    def _urgency(self, long: abc.Sequence[Sequence], now: float) -> float:
        """Return the share of all time that those long prompts need that can still meet the target TTFT."""
        target_s, times, urgency = self._budget.target_ttft_s, self._budget.times, 0.0
        if target_s is None:
            return 0.0
        for seq in long:
            waited_s = now - seq.request.arrival_s
            needed_s = times.chunk_s(seq.num_planned, len(seq.tokens) - seq.num_planned)
            if needed_s > 0 and seq.history.first_token_s < 0 and waited_s + needed_s < target_s:
                urgency += needed_s / max(AIM * target_s - waited_s, needed_s)
        return min(urgency, AIM)
