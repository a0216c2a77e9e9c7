"""Planning of what is known and not computed yet: prompts, and sequences that were computed before and gave way.

A prompt is planned in chunks, as the budgets of its steps allow. Its last chunk draws the first token of each of the
request's choices, and there n > 1 forks. Owned by the scheduler, engine thread.
"""

from __future__ import annotations

from engine.core.flight import Flight
from engine.core.memory import Memory
from engine.core.plan import Sample
from engine.core.roster import Roster
from engine.core.sequence import Sequence, Status


class PromptPlanner:
    """Writes chunks into the plan that is being made."""

    __slots__ = ("_memory", "_roster")

    def __init__(self, memory: Memory, roster: Roster) -> None:
        self._memory, self._roster = memory, roster

    def plan_chunk(self, seq: Sequence, budget: int, flight: Flight) -> int:
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
        return count

    def _first_samples(self, seq: Sequence, flight: Flight) -> tuple[Sample, ...]:
        """The draws at the end of a prompt, one a choice. Here n > 1 forks: all choices share all blocks."""
        if not seq.params.max_tokens:
            return ()
        drawing = [seq]
        if not seq.is_forked:
            seq.is_forked = True
            children = [seq.fork(choice, self._roster.take_seq_id()) for choice in range(1, seq.params.n)]
            self._memory.share(seq, children)
            self._roster.requests[seq.request_id] += children
            flight.children[len(flight.owners)] = children
            for child in children:
                self._roster.start(child)
            drawing += children
        return tuple(sample for sequence in drawing for sample in sequence.samples)
