"""Who lives: all sequences by their request, and the two queues that they stand in.

Both queues are sorted by `order`: best first, victims last. Owned by the scheduler, engine thread.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from operator import attrgetter

from engine.core.flight import Flight
from engine.core.recorder import Recorder
from engine.core.sequence import Sequence

_order = attrgetter("order")
_is_background = attrgetter("is_background")


class Roster:
    """Sequences come, wait, run, and are struck off."""

    __slots__ = ("_next_seq_id", "_recorder", "requests", "running", "waiting")

    def __init__(self, recorder: Recorder) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.requests: dict[str, list[Sequence]] = {}  # the living, by request id
        self._recorder = recorder
        self._next_seq_id = 0

    def take_seq_id(self) -> int:
        """One that no other sequence ever has."""
        self._next_seq_id += 1
        return self._next_seq_id

    def enqueue(self, seq: Sequence) -> None:
        """It waits, in its place."""
        insort(self.waiting, seq, key=_order)
        self._recorder.queued(seq, 1)

    def dequeue(self, seq: Sequence) -> None:
        """It does not wait any more."""
        _withdraw(self.waiting, seq)
        self._recorder.queued(seq, -1)

    def start(self, seq: Sequence) -> None:
        """It runs."""
        insort(self.running, seq, key=_order)

    def stop(self, seq: Sequence) -> None:
        """It does not run any more."""
        _withdraw(self.running, seq)

    def strike(self, seq: Sequence) -> None:
        """It has ended; and with the last of a request's sequences, so has the request."""
        siblings = self.requests[seq.request_id]
        siblings.remove(seq)
        if not siblings:
            del self.requests[seq.request_id]

    @property
    def has_foreground(self) -> bool:
        """True if anybody runs or waits who is not of the background; they come first in both queues."""
        return any(queue and not queue[0].is_background for queue in (self.running, self.waiting))

    @property
    def num_background(self) -> int:
        """How many of the background run: the end of that queue."""
        return len(self.running) - bisect_left(self.running, True, key=_is_background)

    @property
    def num_due(self) -> int:
        """How many of those that run are to be planned: while there is anybody else, the background pauses."""
        return len(self.running) - (self.num_background if self.has_foreground else 0)

    def tell(self) -> None:
        """Bring the gauges up to date."""
        self._recorder.gauges(len(self.running), self.num_background)

    def holders(self, flights: Iterable[Flight]) -> list[Sequence]:
        """Everybody who may hold something: the living, and whom a plan in flight still names."""
        holders = {seq.seq_id: seq for siblings in self.requests.values() for seq in siblings}
        for flight in flights:
            holders.update({seq.seq_id: seq for seq in flight.sequences})
        return list(holders.values())

    def check_integrity(self) -> None:
        """Raise AssertionError if anybody stands in the wrong place."""
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=_order), "a queue is out of order"


def _withdraw(queue: list[Sequence], seq: Sequence) -> None:
    """Take a sequence out of a sorted queue."""
    position = bisect_left(queue, seq.order, key=_order)
    assert queue[position] is seq
    del queue[position]
