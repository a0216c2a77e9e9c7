"""Refuses requests while the queue is full, and forecasts when to try again.

A place becomes free when a running request ends and a waiting one starts. So the ends of the running requests are
forecast: each is expected to last as long as one of the recent answers that were longer than it is so far, and those
that follow as long as any recent answer. Each refused client gets the time of a different place, because clients return
at the time they were given. Any thread may ask: it reads numbers that the engine thread writes. It knows no clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from math import ceil, inf
from typing import NamedTuple

from engine.core.errors import OverloadedError
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence
from engine.core.stats import Stats

MAX_RETRY_S = 120.0  # OpenAI's clients obey a Retry-After of up to two minutes
MIN_RETRY_S = 0.1  # also how long a forecast is used, and what a step is taken to last before one has ended
MAX_RETRIES = 4096  # times that are kept: of more refused clients, most do not return
_MEMORY = 0.98  # weight of the past in the moving average of a step's seconds: about fifty steps count
_SPREAD = 0.6180339887498949  # the golden ratio: its multiples modulo 1 are spread evenly, however many there are


class QueueLimits(NamedTuple):
    """The most requests and tokens that may wait; None is no limit."""

    max_requests: int | None = None
    max_tokens: int | None = None

    def find_full(self, num_ahead: int, num_tokens: int, num_new_tokens: int) -> str:
        """Return a sentence about the limit that a request of `num_new_tokens` would exceed, or "".

        `num_ahead` requests and `num_tokens` prompt tokens wait. With a free slot any request is accepted: a large one would
        never be accepted otherwise.
        """
        if num_ahead < 0:
            return ""
        if self.max_requests is not None and num_ahead >= self.max_requests:
            return f"{num_ahead} requests wait already (--max-num-queued-reqs {self.max_requests})"
        if self.max_tokens is not None and num_tokens + num_new_tokens > self.max_tokens:
            return f"{num_tokens} prompt tokens wait already (--max-num-queued-tokens {self.max_tokens})"
        return ""


NO_LIMITS = QueueLimits()


def count_ahead(stats: Stats, max_num_seqs: int) -> int:
    """Return how many requests will wait when all free slots are taken; negative while a slot stays free."""
    num_running = stats.num_running - stats.num_background_running  # background work yields its slots
    return stats.num_waiting + stats.num_preempted - max(max_num_seqs - num_running, 0)


class RetryTimes:
    """The times that refused clients were given."""

    def __init__(self) -> None:
        self._times: list[float] = []  # a heap

    def count(self, now: float) -> int:
        """Return how many of the times are in the future."""
        while self._times and self._times[0] <= now:
            heappop(self._times)
        return len(self._times)

    def add(self, at_s: float) -> None:
        if len(self._times) < MAX_RETRIES:
            heappush(self._times, at_s)


class OverloadControl:
    """Checks each submission; `stepped` is called for each step."""

    def __init__(self, scheduler: Scheduler, limits: QueueLimits) -> None:
        self._scheduler = scheduler
        self._stats = scheduler.stats
        self._limits = limits
        self._step_s = 0.0  # moving average of a step's duration
        self._retry_times = RetryTimes()
        self._forecast: Iterator[float] = iter(())  # seconds from _forecast_s to the departures not yet in _departures
        self._forecast_s = -inf
        self._departures: list[float] = []

    def stepped(self, seconds: float) -> None:
        """Note a step's duration."""
        memory = _MEMORY if self._step_s else 0.0
        self._step_s = memory * self._step_s + (1 - memory) * seconds

    def check(self, now: float, num_new_tokens: int, *, num_unseen: int = 0, num_unseen_tokens: int = 0) -> None:
        """Raise OverloadedError if the queue is full. `num_unseen` requests have not reached the scheduler yet."""
        stats = self._stats
        num_ahead = count_ahead(stats, self._scheduler.config.max_num_seqs) + num_unseen
        num_tokens = stats.num_waiting_tokens + num_unseen_tokens
        full = self._limits.find_full(num_ahead, num_tokens, num_new_tokens)
        if not full:
            return
        stats.rejected += 1
        num_departures = self._count_departures(num_ahead, num_tokens + num_new_tokens)
        wait_s = self._seconds_to(num_departures + self._retry_times.count(now), now)
        self._retry_times.add(now + wait_s)
        raise OverloadedError(f"The queue is full: {full}; try again in {ceil(wait_s)} s.", retry_after_s=wait_s)

    def _count_departures(self, num_ahead: int, num_tokens: int) -> int:
        """Return how many waiting requests have to start before a place is free."""
        num_departures = 1
        if self._limits.max_requests is not None:
            num_departures = max(num_departures, num_ahead - self._limits.max_requests + 1)
        if self._limits.max_tokens is not None:
            per_request = max(num_tokens / (num_ahead + 1), 1.0)
            num_departures = max(num_departures, ceil((num_tokens - self._limits.max_tokens) / per_request))
        return num_departures

    def _seconds_to(self, departure: int, now: float) -> float:
        """Return the seconds until `departure` of the running and following requests will have ended."""
        if now - self._forecast_s > MIN_RETRY_S:
            self._forecast, self._forecast_s, self._departures = self._forecast_departures(), now, []
        while len(self._departures) < departure and (self._departures or [0.0])[-1] < MAX_RETRY_S:
            self._departures.append(next(self._forecast))
        at_s = self._departures[min(departure, len(self._departures)) - 1] - (now - self._forecast_s)
        return min(max(at_s, MIN_RETRY_S), MAX_RETRY_S)

    def _forecast_departures(self) -> Iterator[float]:
        """Yield the seconds to each departure, without end."""
        known = sorted(self._scheduler.recent_answers)
        running = [seq for seq in self._scheduler.running if not seq.is_background]
        stats = self._stats
        tokens_a_step = 1 + stats.spec_accepted_tokens / max(stats.spec_drafts, 1)
        step_s = (self._step_s or MIN_RETRY_S) / tokens_a_step
        shares = (number * _SPREAD % 1 for number in count(1))
        ends: dict[int, int] = {}  # steps until the last sequence of a request ends
        for seq in running:
            request = id(seq.request)
            ends[request] = max(ends.get(request, 0), self._steps_left(seq, known, next(shares)))
        heap = list(ends.values()) or [1]
        heapify(heap)
        most = sum(seq.params.max_tokens for seq in running) // max(len(running), 1) or 1
        num_waiting = stats.num_waiting + stats.num_preempted
        prompt_steps = self._prompt_steps(stats.num_waiting_tokens // max(num_waiting, 1))
        while True:
            step = heap[0]
            yield step * step_s
            heapreplace(heap, step + prompt_steps + _length(known, 0, most, next(shares)))

    def _steps_left(self, seq: Sequence, known: list[float], share: float) -> int:
        num_generated = max(len(seq.tokens) - seq.num_prompt, 0)
        end = _length(known, num_generated, seq.params.max_tokens, share)
        return max(end - num_generated, 1) + self._prompt_steps(seq.num_prompt - seq.num_planned)

    def _prompt_steps(self, num_tokens: int) -> int:
        """Return the steps of a prompt that shares none with another prompt."""
        return max(-(-num_tokens // self._scheduler.config.max_num_batched_tokens), 0)


def _length(known: list[float], num_generated: int, max_tokens: int, share: float) -> int:
    """Return an answer's expected length: of the sorted lengths above `num_generated`, the one at this share."""
    first = bisect_right(known, num_generated)
    if first == len(known):
        return max_tokens
    return int(min(known[first + int(share * (len(known) - first))], max_tokens))
