"""Who lives: all sequences by their request, and the two queues that they stand in.

Those that run are sorted by `place`: best first, victims last. Owned by the scheduler, engine thread.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from operator import attrgetter

from engine.core.config import SchedulerConfig
from engine.core.fairness import INPUT_COST, charge_generated, interleave, place_of, takeable
from engine.core.flight import Flight
from engine.core.recorder import Recorder
from engine.core.sequence import Sequence
from engine.core.waiting import WaitingQueue

_place = attrgetter("place")
_is_background = attrgetter("is_background")


class Roster:
    """Sequences come, wait, run, and are struck off."""

    __slots__ = ("_next_seq_id", "_recorder", "is_fair", "requests", "running", "waiting")

    def __init__(self, recorder: Recorder, config: SchedulerConfig) -> None:
        self.is_fair = config.policy == "fair"  # tenants are told apart
        self.waiting = WaitingQueue(is_fair=self.is_fair)
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
        self.waiting.add(seq)
        self._recorder.queued(seq, 1)

    def dequeue(self, seq: Sequence) -> None:
        """It does not wait any more."""
        self.waiting.remove(seq)
        self._recorder.queued(seq, -1)

    def start(self, seq: Sequence) -> None:
        """It runs. Its prompt is charged when it does so for the first time."""
        account = seq.account
        account.num_running += 1
        if not seq.num_charged:
            seq.num_charged = seq.num_prompt
            account.charge(INPUT_COST * (seq.num_prompt - seq.num_computed))
        if self.is_fair:
            seq.place = place_of(seq, account.num_running)
        insort(self.running, seq, key=_place)

    def stop(self, seq: Sequence) -> None:
        """It does not run any more."""
        seq.account.num_running -= 1
        position = bisect_left(self.running, seq.place, key=_place)
        assert self.running[position] is seq
        del self.running[position]

    def interleave(self) -> None:
        """Have the last place be that of whoever is to give way first; before anybody may have to."""
        if self.is_fair:
            interleave(self.running)

    def charge(self, flight: Flight) -> None:
        """After a commit: tenants are charged for what it has drawn."""
        if self.is_fair:
            charge_generated(flight.sequences)

    def takeable(self, seq: Sequence) -> list[Sequence]:
        """Who may be preempted, if need be all of them, so that a waiting sequence can run; first to go first.

        The background; or, with `fair`, some of a tenant's that holds too much.
        """
        if seq.is_background or not self.running:
            return []
        if (num_background := self.num_background) or not self.is_fair:
            return self.running[len(self.running) - num_background :][::-1]
        return takeable(self.running, seq)

    @property
    def has_takeable(self) -> bool:
        """True if `takeable` may find anybody."""
        return self.is_fair or self.num_background > 0

    def strike(self, seq: Sequence) -> None:
        """It has ended; and with the last of a request's sequences, so has the request."""
        siblings = self.requests[seq.request_id]
        siblings.remove(seq)
        if not siblings:
            del self.requests[seq.request_id]

    @property
    def has_foreground(self) -> bool:
        """True if anybody runs or waits who is not of the background; they come first in both queues."""
        return self.waiting.has_foreground or bool(self.running and not self.running[0].is_background)

    @property
    def num_background(self) -> int:
        """How many of the background run: the end of that queue."""
        if not (self.running and self.running[-1].is_background):
            return 0
        return len(self.running) - bisect_left(self.running, True, key=_is_background)

    @property
    def num_due(self) -> int:
        """How many of those that run are to be planned: while there is anybody else, the background pauses."""
        return len(self.running) - (self.num_background if self.has_foreground else 0)

    def due(self, limit: int) -> list[Sequence]:
        """The best of those that run, no more than `limit` that can be planned."""
        due = self.running[: self.num_due]
        if len(due) <= limit:
            return due
        return [seq for seq in due if not seq.is_waiting][:limit]

    def tell(self) -> None:
        """Bring the gauges up to date."""
        self._recorder.gauges(len(self.running), self.num_background)

    def holders(self, flights: Iterable[Flight]) -> list[Sequence]:
        """Everybody who may hold something: the living, and whom a plan in flight still names."""
        holders: dict[int, Sequence] = {}
        for siblings in self.requests.values():
            for seq in siblings:
                holders.update({each.seq_id: each for each in seq.beams or (seq,)})
        for flight in flights:
            holders.update({seq.seq_id: seq for seq in flight.sequences})
        return list(holders.values())

    def check_integrity(self) -> None:
        """Raise AssertionError if anybody stands in the wrong place."""
        assert self.running == sorted(self.running, key=_place), "those that run are out of order"
        self.waiting.check_integrity()
        held = Counter([seq.account for seq in self.running])
        assert all(account.num_running == num for account, num in held.items()), "a tenant's holding is miscounted"
