"""Drops waiting requests that can no longer meet their `deadline_ms` or `max_queue_ms`.

A request is dropped once it would be late even if it started immediately and had the engine to itself, so nothing is
dropped that might have been in time. A request that has started is never dropped. Only requests with such fields cost
anything: a heap of the times at which they are checked. Engine thread.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf

from engine.core.budget import StepTime
from engine.core.config import SchedulerConfig
from engine.core.errors import DeadlineError
from engine.core.kv.manager import KVCacheManager
from engine.core.sequence import Sequence, Status
from engine.core.stats import Target
from engine.core.types import SamplingParams


class Deadlines:
    """The waiting sequences that have deadlines."""

    def __init__(self, kv: KVCacheManager, times: StepTime, config: SchedulerConfig) -> None:
        self._kv, self._times, self._max_step_tokens = kv, times, config.max_num_batched_tokens
        self._tokens_a_step = 1 + config.num_speculative_tokens  # most that a step can sample for one sequence
        self._heap: list[tuple[float, int, Sequence]] = []
        self._num_kept = 0  # entries when those of requests that have left the queue were cleared last

    def watch(self, seq: Sequence) -> None:
        """Watch a new sequence, whose request has a deadline."""
        if len(self._heap) > 2 * self._num_kept:
            self._heap = [entry for entry in self._heap if entry[2].status is Status.WAITING]
            heapify(self._heap)
            self._num_kept = len(self._heap)
        heappush(self._heap, (min(self._last_starts(seq, 0)), seq.seq_id, seq))

    def take_hopeless(self, now: float) -> list[tuple[Sequence, Target, DeadlineError]]:
        """Return the sequences that cannot be in time any more, with target and error."""
        hopeless = []
        while self._heap and self._heap[0][0] < now:
            _, seq_id, seq = heappop(self._heap)
            if seq.status is not Status.WAITING:
                continue
            by_deadline, by_queue = self._last_starts(seq, self._kv.lookup(seq))
            if now <= min(by_deadline, by_queue):  # the estimate has changed, or its prompt is cached now
                heappush(self._heap, (min(by_deadline, by_queue), seq_id, seq))
            else:
                target = Target.QUEUE if by_queue < now else Target.DEADLINE
                hopeless.append((seq, target, DeadlineError(self._sentence(seq, target, now))))
        return hopeless

    def _last_starts(self, seq: Sequence, num_cached: int) -> tuple[float, float]:
        """Return the latest start for its deadline, and that for its max_queue_ms."""
        request = seq.request
        by_deadline = inf if request.deadline_s is None else request.deadline_s - self._least_s(seq, num_cached)
        by_queue = inf if request.max_queue_s is None else request.max_queue_s
        return request.arrival_s + by_deadline, request.arrival_s + by_queue

    def _least_s(self, seq: Sequence, num_cached: int) -> float:
        """Return the seconds it takes alone: its prompt, then at least min_tokens."""
        if not self._times.is_known:
            return 0.0
        costs, params = self._times.costs, seq.request.params
        least = params.min_tokens if isinstance(params, SamplingParams) else 0
        num_decodes = -(-max(least - 1, 0) // self._tokens_a_step)
        num_known = len(seq.tokens) - num_cached
        num_chunks = -(-num_known // self._max_step_tokens)
        prompt_s = num_chunks * (costs.fixed_s + costs.chunked_s) + self._times.chunk_s(num_cached, num_known)
        context = num_decodes * len(seq.tokens) + num_decodes * (num_decodes - 1) // 2
        return prompt_s + num_decodes * (costs.fixed_s + costs.decode_s) + costs.decode_context_s * context

    def _sentence(self, seq: Sequence, target: Target, now: float) -> str:
        request, waited_s = seq.request, now - seq.request.arrival_s
        if target is Target.QUEUE:
            return (
                f"The request was not started in time: max_queue_ms is {_ms(request.max_queue_s)}, and it has been waiting "
                f"for {_ms(waited_s)} ms. Nothing of it was computed."
            )
        least_s = self._least_s(seq, self._kv.lookup(seq))
        return (
            f"The answer cannot be there in time: deadline_ms is {_ms(request.deadline_s)}, of which {_ms(waited_s)} have "
            f"passed in the queue, and computing it takes at least {_ms(least_s)} ms. Nothing of it was computed."
        )


def _ms(seconds: float | None) -> str:
    return f"{1e3 * (seconds or 0.0):.0f}"
