"""Planning of what is known and not computed yet: prompts, and sequences that were computed before and gave way.

A prompt is planned in chunks, as the budgets of its steps allow. Its last chunk draws the first token of each of the
request's choices, and there n > 1 forks.

No prompt blocks the line. Short ones go first, whole and in order, and long ones share what pacing.py leaves them: half is the
first one's, half the one's that is soonest through. Whoever is first in line gets on with every step:

    a step holds at least 1 token of the first in line, and if that is long, 1 / RESERVE of the tokens are not for short ones

Owned by the scheduler, engine thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from engine.core.budget import Allowance
from engine.core.in_flight import InFlightStep
from engine.core.kv.manager import KVCacheManager
from engine.core.running import RunningQueue
from engine.core.sequence import Sequence, Status
from engine.core.step import Sample


class PromptPlanner:
    """Writes chunks into the plan that is being made."""

    __slots__ = ("_kv", "_queue")

    def __init__(self, kv: KVCacheManager, queue: RunningQueue) -> None:
        self._kv, self._queue = kv, queue

    def plan(
        self,
        catching_up: list[Sequence],
        admitted: Iterable[Sequence],
        allowance: Allowance,
        now: float,
        step: InFlightStep,
        *,
        shares: bool,
    ) -> None:
        """Plan chunks within the allowance. Without `shares` all go in order.

        `admitted` is asked for one more sequence at a time, while there is room for it. What is swapped in computes in the
        next step, so that this one need not wait for its blocks, unless it would have nothing else to do.
        """
        long = [seq for seq in catching_up if seq.is_chunked_prefill and shares]
        allowance.begin_prompts(holds_back=bool(long) and long[0] is catching_up[0])
        is_full = not allowance.num_tokens
        for seq in catching_up:
            if not (seq.is_chunked_prefill and shares):
                self._plan_chunk(seq, allowance, step)
                is_full = is_full or seq.status is Status.PREFILL
        late: list[Sequence] = []
        if allowance.num_tokens and not is_full:
            self._plan_admitted(admitted, allowance, step, long if shares else None, late)
        allowance.release()
        # Some may have been preempted for others that were admitted.
        if long := [seq for seq in long if seq.status is Status.PREFILL]:
            self._plan_long(long, allowance, now, step)
        elif not step.slices and (late := [seq for seq in late if seq.status is Status.PREFILL]):
            self._plan_chunk(late[0], allowance, step)

    def _plan_admitted(
        self,
        admitted: Iterable[Sequence],
        allowance: Allowance,
        step: InFlightStep,
        long: list[Sequence] | None,
        late: list[Sequence],
    ) -> None:
        """Plan those that are short; the others join the `long` ones, if there are such, or the `late`."""
        num_moves = len(step.swap_in)
        for seq in admitted:
            if len(step.swap_in) > num_moves:
                num_moves = len(step.swap_in)
                late.append(seq)
            elif seq.is_chunked_prefill and long is not None:
                long.append(seq)
            else:
                self._plan_chunk(seq, allowance, step)
                if seq.status is Status.PREFILL or not allowance.num_tokens:
                    break

    def _plan_long(self, long: list[Sequence], allowance: Allowance, now: float, step: InFlightStep) -> None:
        """Plan the part of the long ones: half is for the first, half for the one that is soonest through."""
        seconds = allowance.long_s(long, now)
        first, soonest = long[0], min(long, key=_num_to_plan)
        if soonest is first:
            allowance.seconds = seconds
            self._plan_chunk(first, allowance, step, least=1)
            return
        allowance.seconds = seconds / 2
        self._plan_chunk(first, allowance, step, least=1)
        allowance.seconds += seconds / 2 if seconds < inf else 0.0
        self._plan_chunk(soonest, allowance, step)

    def _plan_chunk(self, seq: Sequence, allowance: Allowance, step: InFlightStep, least: int = 0) -> None:
        """Plan the next chunk of a sequence that is catching up, of at least `least` positions."""
        start = seq.num_planned
        count = allowance.prompt(start, len(seq.tokens) - start, least)
        if not count:
            return
        stop = seq.num_planned = start + count
        samples: tuple[Sample, ...] = ()
        if stop == len(seq.tokens):
            seq.move(Status.RUNNING)
            samples = self._first_samples(seq, step)
        step.add_chunk(seq, start, count, samples)

    def _first_samples(self, seq: Sequence, step: InFlightStep) -> tuple[Sample, ...]:
        """The draws at the end of a prompt, one a choice. Here n > 1 forks: all choices share all blocks."""
        if not seq.params.max_tokens:
            return ()
        drawing = [seq]
        if not seq.is_forked and seq.beam_group is None:  # of a search only the first beam is there yet
            seq.is_forked = True
            children = [seq.fork(choice, self._queue.take_seq_id()) for choice in range(1, seq.params.n)]
            self._kv.fork(seq, children)
            self._queue.requests[seq.request_id] += children
            step.children[len(step.sequences)] = children
            for child in children:
                self._queue.start(child)
            drawing += children
        return tuple(sample for sequence in drawing for sample in sequence.samples)


def _num_to_plan(seq: Sequence) -> int:
    return len(seq.tokens) - seq.num_planned
