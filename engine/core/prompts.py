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
        self,
        catching_up: list[Sequence],
        admitted: Iterable[Sequence],
        budget: int,
        now: float,
        flight: Flight,
        *,
        shares: bool,
    ) -> int:
        """Plan chunks of at most `budget` positions in all; returns what is left. Without `shares` all go in order.

        `admitted` is asked for one more sequence at a time, while there is room for it. What is swapped in computes in the
        next step, so that this one need not wait for its blocks, unless it would have nothing else to do.
        """
        flight.load = decode_load(flight.slices)
        flight.spare_s = self._pacing.prompts_s(flight.load)
        long = [seq for seq in catching_up if seq.is_long and shares]
        reserve, reserve_s = 0, 0.0
        if long and long[0] is catching_up[0]:
            reserve = -(-budget // RESERVE)
        if reserve and flight.spare_s < inf:
            reserve_s = flight.spare_s * reserve / budget
        left = budget - reserve
        flight.spare_s -= reserve_s
        is_full = not left
        for seq in catching_up:
            if not (seq.is_long and shares):
                left -= self._plan_chunk(seq, left, flight)
                is_full = is_full or seq.status is Status.PREFILL
        late: list[Sequence] = []
        if left and not is_full:
            left = self._plan_admitted(admitted, left, flight, long if shares else None, late)
        left += reserve
        flight.spare_s += reserve_s
        # Some may have given way to others that were admitted.
        if long := [seq for seq in long if seq.status is Status.PREFILL]:
            left -= self._plan_long(long, left, now, flight)
        elif not flight.slices and (late := [seq for seq in late if seq.status is Status.PREFILL]):
            left -= self._plan_chunk(late[0], left, flight)
        return left

    def _plan_admitted(
        self,
        admitted: Iterable[Sequence],
        left: int,
        flight: Flight,
        long: list[Sequence] | None,
        late: list[Sequence],
    ) -> int:
        """Those that are short; the others join the `long` ones, if there are such, or the `late`. Returns what is left."""
        num_moves = len(flight.swap_in)
        for seq in admitted:
            if len(flight.swap_in) > num_moves:
                num_moves = len(flight.swap_in)
                late.append(seq)
            elif seq.is_long and long is not None:
                long.append(seq)
            else:
                left -= self._plan_chunk(seq, left, flight)
                if seq.status is Status.PREFILL or not left:
                    break
        return left

    def _plan_long(self, long: list[Sequence], budget: int, now: float, flight: Flight) -> int:
        """The part of the long ones: half is for the first, half for the one that is soonest through; returns how many."""
        times = self._pacing.times
        seconds = min(self._pacing.long_s(flight.load, long, now), flight.spare_s)
        first, soonest = long[0], min(long, key=_num_to_plan)
        flight.spare_s = seconds if first is soonest else seconds / 2
        count = self._plan_chunk(first, budget, flight, least=1)
        if soonest is not first:
            flight.spare_s = seconds - times.chunk_s(first.num_planned - count, count)
            count += self._plan_chunk(soonest, budget - count, flight)
        return count

    def _finish_chunk(self, seq: Sequence, stop: int, flight: Flight) -> tuple[Sample, ...]:
        """The positions before `stop` are planned: what is drawn from the last of them."""
        seq.num_planned = stop
        if stop < len(seq.tokens):
            return ()
        seq.move(Status.RUNNING)
        return self._first_samples(seq, flight)

    def _plan_chunk(self, seq: Sequence, budget: int, flight: Flight, least: int = 0) -> int:
        """Plan the next chunk of a sequence that is catching up, of at most `budget` positions; returns how many.

        It is as long as the seconds that the step has left for prompts, but never shorter than `least`, nor is a step's first.
        """
        start, times = seq.num_planned, self._pacing.times
        if flight.spare_s < inf:
            least = least or not flight.load.num_prompt_tokens
            budget = min(budget, max(int(min(times.tokens_within(flight.spare_s, start), budget)), least))
        count = min(len(seq.tokens) - start, budget)
        if not count:
            return 0
        flight.spare_s -= times.chunk_s(start, count)
        samples = self._finish_chunk(seq, start + count, flight)
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
