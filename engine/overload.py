"""Refuses requests while the queue is full.

Places become free one by one, at the pace at which recent answers were completed. Each refused client is given the time
of a different place, because clients return at the time they were given. Any thread may ask; it knows no clock.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import ceil
from typing import NamedTuple

from engine.core.config import SchedulerConfig
from engine.core.errors import OverloadedError
from engine.core.stats import Stats

MAX_RETRY_S = 120.0  # OpenAI's clients obey a Retry-After of up to two minutes
MIN_RETRY_S = 0.1
INPUTS_AS_ONE = 64  # that wait; of 4 kB each, behind a limit of 1,024 requests they are at most 260 MB
UNKNOWN_S = 1.0  # until a place is free, while no answer was completed


class QueueLimits(NamedTuple):
    """The most requests and tokens that may wait; None is no limit."""

    max_requests: int | None = None
    max_tokens: int | None = None

    def find_full(self, num_ahead: int, num_tokens: int, num_new_tokens: int) -> str:
        """Return a sentence about the limit that a request of `num_new_tokens` would exceed, or "".

        With a free slot any request is accepted: a large one would never be accepted otherwise.
        """
        if num_ahead < 0:
            return ""
        if self.max_requests is not None and num_ahead >= self.max_requests:
            return f"{num_ahead} requests wait already (--max-num-queued-reqs {self.max_requests})"
        if self.max_tokens is not None and num_tokens + num_new_tokens > self.max_tokens:
            return f"{num_tokens} prompt tokens wait already (--max-num-queued-tokens {self.max_tokens})"
        return ""

    def count_departures(self, num_ahead: int, num_inputs: int, num_tokens: int) -> int:
        """Return how many of the `num_inputs` of waiting requests have to start before there is a place."""
        num_departures = 1
        if self.max_requests is not None:
            per_request = num_inputs / max(num_ahead, 1)
            num_departures = max(num_departures, ceil((num_ahead - self.max_requests + 1) * per_request))
        if self.max_tokens is not None:
            per_input = max(num_tokens / (num_inputs + 1), 1.0)
            num_departures = max(num_departures, ceil((num_tokens - self.max_tokens) / per_input))
        return num_departures


NO_LIMITS = QueueLimits()


class RetryTimes:
    """The times that refused clients were given."""

    def __init__(self) -> None:
        self._times: list[float] = []  # a heap

    def give(self, now: float, wait_s: float, each_s: float) -> float:
        """Return a client's wait: `each_s` more for each client with an earlier time."""
        while self._times and self._times[0] <= now:
            heappop(self._times)
        wait_s = max(wait_s + len(self._times) * each_s, MIN_RETRY_S)
        if wait_s >= MAX_RETRY_S:
            return MAX_RETRY_S
        heappush(self._times, now + wait_s)
        return wait_s


class OverloadControl:
    """Checks each submission against the queue's limits."""

    def __init__(self, config: SchedulerConfig, stats: Stats, limits: QueueLimits) -> None:
        self._max_num_seqs, self._stats, self._limits = config.max_num_seqs, stats, limits
        self._retry_times = RetryTimes()

    def check(
        self,
        now: float,
        num_new_tokens: int,
        *,
        num_unseen: int = 0,
        num_unseen_further: int = 0,
        num_unseen_tokens: int = 0,
    ) -> None:
        """Raise OverloadedError if the queue is full; `num_unseen` requests are still in the inbox.

        A client's request counts as one until its first input runs, and so do INPUTS_AS_ONE inputs: each takes memory.
        """
        stats = self._stats
        num_running = stats.num_running - stats.num_background_running  # background work yields its slots
        num_waiting = stats.num_waiting + stats.num_preempted + num_unseen
        num_inputs = num_waiting - max(self._max_num_seqs - num_running, 0)  # when all free slots are taken
        num_clients = num_waiting - stats.num_further - num_unseen_further
        num_ahead = max(min(num_inputs, num_clients), num_inputs // INPUTS_AS_ONE)
        num_tokens = stats.num_waiting_tokens + num_unseen_tokens
        full = self._limits.find_full(num_ahead, num_tokens, num_new_tokens)
        if not full:
            return
        stats.rejected += 1
        num_departures = self._limits.count_departures(num_ahead, num_inputs, num_tokens + num_new_tokens)
        each_s = stats.answer_s / max(num_running, 1) or UNKNOWN_S
        wait_s = self._retry_times.give(now, num_departures * each_s, each_s)
        raise OverloadedError(f"The queue is full: {full}; try again in {ceil(wait_s)} s.", retry_after_s=wait_s)
