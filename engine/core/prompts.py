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

from engine.core.flight import Flight
from engine.core.memory import Memory
from engine.core.pacing import Pacing
from engine.core.plan import Sample
from engine.core.roster import Roster
from engine.core.sequence import Sequence, Status
from engine.core.step_time import decode_load

RESERVE = 8


class PromptPlanner:
    """Writes chunks into the plan that is being made."""

    __slots__ = ("_memory", "_pacing", "_roster")

    def __init__(self, memory: Memory, roster: Roster, pacing: Pacing) -> None:
        self._memory, self._roster, self._pacing = memory, roster, pacing

    def plan(
        self, catching_up: list[Sequence], admitted: Iterable[Sequence], budget: int, flight: Flight, *, shares: bool
    ) -> int:
        """Plan chunks of at most `budget` positions in all; returns what is left. Without `shares` all go in order.

        `admitted` is asked for one more sequence at a time, while there is budget for it. What is swapped in computes in the
        next step, so that this one need not wait for its blocks, unless it would have nothing else to do.
        """
        flight.load = decode_load(flight.slices)
        long = [seq for seq in catching_up if seq.is_long and shares]
        reserve = -(-budget // RESERVE) if long and long[0] is catching_up[0] else 0
        left = budget - reserve
        for seq in catching_up:
            if not (seq.is_long and shares):
                left -= self._plan_chunk(seq, left, flight)
        late: list[Sequence] = []
        num_moves = len(flight.swap_in)
        for seq in admitted if left else ():
            if len(flight.swap_in) > num_moves:
                num_moves = len(flight.swap_in)
                late.append(seq)
            elif seq.is_long and shares:
                long.append(seq)
            else:
                left -= self._plan_chunk(seq, left, flight)
            if not left:
                break
        left += reserve
        # Some may have given way to others that were admitted.
        if long := [seq for seq in long if seq.status is Status.PREFILL]:
            left -= self._plan_long(long, left, flight)
        elif not flight.slices and (late := [seq for seq in late if seq.status is Status.PREFILL]):
            left -= self._plan_chunk(late[0], left, flight)
        return left

    def _plan_long(self, long: list[Sequence], budget: int, flight: Flight) -> int:
        """The part of the long ones: half is for the first, half for the one that is soonest through; returns how many."""
        pacing = self._pacing
        seconds = pacing.long_s(flight.load, len(long))
        first, soonest = long[0], min(long, key=_num_to_plan)
        seconds *= 1.0 if first is soonest else 0.5
        count = self._plan_chunk(first, max(self._within(seconds, first, budget), min(budget, 1)), flight)
        if soonest is not first:
            count += self._plan_chunk(soonest, self._within(seconds, soonest, budget - count), flight)
        return count

    def _within(self, seconds: float, seq: Sequence, budget: int) -> int:
        """Positions of a sequence that fit both."""
        return int(min(self._pacing.times.tokens_within(seconds, seq.num_planned), budget))

    def _plan_chunk(self, seq: Sequence, budget: int, flight: Flight) -> int:
        """Plan the next chunk of a sequence that is catching up, of at most `budget` positions; returns how many."""
        start = seq.num_planned
        count = min(len(seq.tokens) - start, budget)
        if not count:
            return 0
        seq.num_planned = start + count
        samples: tuple[Sample, ...] = ()
        if seq.num_planned == len(seq.tokens):
            seq.move(Status.RUNNING)
            samples = self._first_samples(seq, flight)
        flight.add_chunk(seq, start, count, samples)
        flight.load = flight.load.with_chunk(start, count)
        return count

    def _first_samples(self, seq: Sequence, flight: Flight) -> tuple[Sample, ...]:
        """The draws at the end of a prompt, one a choice. Here n > 1 forks: all choices share all blocks."""
        if not seq.params.max_tokens:
            return ()
        drawing = [seq]
        if not seq.is_forked and seq.search is None:  # of a search only the first beam is there yet
            seq.is_forked = True
            children = [seq.fork(choice, self._roster.take_seq_id()) for choice in range(1, seq.params.n)]
            self._memory.share(seq, children)
            self._roster.requests[seq.request_id] += children
            flight.children[len(flight.owners)] = children
            for child in children:
                self._roster.start(child)
            drawing += children
        return tuple(sample for sequence in drawing for sample in sequence.samples)


def _num_to_plan(seq: Sequence) -> int:
    return len(seq.tokens) - seq.num_planned
