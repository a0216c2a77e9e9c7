"""The queue's door: refuses a request that the queue has no place for, and estimates when there will be one.

A place is free whenever a request that runs has ended and one that waits has started. So the departures of those that run
are forecast: each is taken to last as long as one of the recent answers that were longer than what it has so far, those
that follow as long as any recent answer. Clients that were refused come back when they were told to, so each is told the
time of another place. Reads numbers that the engine's thread writes; knows no clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from math import ceil, inf

from engine.core.errors import OverloadedError
from engine.core.queue_limits import QueueLimits, count_ahead
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence

MAX_RETRY_S = 120.0  # OpenAI's clients obey a Retry-After up to two minutes
MIN_RETRY_S = 0.1
FRESH_S = 0.25  # a forecast serves all refusals of this time
MAX_APPOINTMENTS = 4096  # with more of them, most clients do not come back
_UNKNOWN_STEP_S = 0.05  # a step's seconds while none has ended
_MEMORY = 0.98  # weight of the past in the moving average of a step's seconds
_SPREAD = 0.6180339887498949  # multiples of it, modulo 1, are spread evenly however many there are


class Appointments:
    """The times at which refused clients were told to come back."""

    def __init__(self) -> None:
        self._times: list[float] = []  # a heap

    def count(self, now: float) -> int:
        """How many are still to come."""
        while self._times and self._times[0] <= now:
            heappop(self._times)
        return len(self._times)

    def add(self, at_s: float) -> None:
        if len(self._times) < MAX_APPOINTMENTS:
            heappush(self._times, at_s)


class Door:
    """`check` each submission, and tell it of each step."""

    def __init__(self, scheduler: Scheduler, limits: QueueLimits) -> None:
        self._scheduler = scheduler
        self._stats = scheduler.stats
        self._limits = limits
        self._step_s = 0.0  # what a step takes, lately
        self._appointments = Appointments()
        self._forecast: Iterator[float] = iter(())  # seconds from _forecast_s to the departures not yet in _departures
        self._forecast_s = -inf
        self._departures: list[float] = []

    def stepped(self, seconds: float) -> None:
        """A step took so long."""
        memory = _MEMORY if self._step_s else 0.0
        self._step_s = memory * self._step_s + (1 - memory) * seconds

    def check(self, now: float, num_new_tokens: int, *, num_unseen: int = 0, num_unseen_tokens: int = 0) -> None:
        """Raise OverloadedError if there is no place; `num_unseen` requests wait that the scheduler has not seen yet."""
        stats = self._stats
        num_ahead = count_ahead(stats, self._scheduler.config.max_num_seqs) + num_unseen
        num_tokens = stats.num_waiting_tokens + num_unseen_tokens
        full = self._limits.find_full(num_ahead, num_tokens, num_new_tokens)
        if not full:
            return
        stats.rejected += 1
        num_departures = self._count_departures(num_ahead, num_tokens + num_new_tokens)
        wait_s = self._seconds_to(num_departures + self._appointments.count(now), now)
        self._appointments.add(now + wait_s)
        raise OverloadedError(f"The queue is full: {full}; try again in {ceil(wait_s)} s.", retry_after_s=wait_s)

    def _count_departures(self, num_ahead: int, num_tokens: int) -> int:
        """How many of those that wait have to start before there is a place."""
        num_departures = 1
        if self._limits.max_requests is not None:
            num_departures = max(num_departures, num_ahead - self._limits.max_requests + 1)
        if self._limits.max_tokens is not None:
            per_request = max(num_tokens / (num_ahead + 1), 1.0)
            num_departures = max(num_departures, ceil((num_tokens - self._limits.max_tokens) / per_request))
        return num_departures

    def _seconds_to(self, departure: int, now: float) -> float:
        """When so many of those that run now, or follow them, will have ended."""
        if now - self._forecast_s > FRESH_S:
            self._forecast, self._forecast_s, self._departures = self._forecast_departures(), now, []
        while len(self._departures) < departure and (self._departures or [0.0])[-1] < MAX_RETRY_S:
            self._departures.append(next(self._forecast))
        at_s = self._departures[min(departure, len(self._departures)) - 1] - (now - self._forecast_s)
        return min(max(at_s, MIN_RETRY_S), MAX_RETRY_S)

    def _forecast_departures(self) -> Iterator[float]:
        """The seconds to each departure, without end."""
        known = sorted(self._scheduler.recent_answers)
        running = [seq for seq in self._scheduler.running if not seq.is_background]
        stats = self._stats
        tokens_a_step = 1 + stats.spec_accepted_tokens / max(stats.spec_drafts, 1)
        step_s = (self._step_s or _UNKNOWN_STEP_S) / tokens_a_step
        shares = (number * _SPREAD % 1 for number in count(1))
        ends: dict[int, int] = {}  # of requests, whose sequences end one by one
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
        """What a prompt takes if it shares steps with nobody else's."""
        return max(-(-num_tokens // self._scheduler.config.max_num_batched_tokens), 0)


def _length(known: list[float], num_generated: int, max_tokens: int, share: float) -> int:
    """That of an answer which has got so far: of the sorted ones that are longer, the one at that share of them."""
    first = bisect_right(known, num_generated)
    if first == len(known):
        return max_tokens
    return int(min(known[first + int(share * (len(known) - first))], max_tokens))
