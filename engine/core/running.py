"""The living sequences by their request, those that wait in two queues, and those that run.

What runs is sorted by `place`: best first, victims last. Owned by the scheduler, engine thread.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from operator import attrgetter

from engine.core.config import SchedulerConfig
from engine.core.in_flight import InFlightStep
from engine.core.queues import POLICIES, Queue
from engine.core.recorder import StatsRecorder
from engine.core.sequence import Sequence

_place = attrgetter("place")
_is_background = attrgetter("is_background")


class RunningQueue:
    """Sequences come, wait, run, and are struck off."""

    __slots__ = ("_next_seq_id", "_recorder", "background", "foreground", "parked", "requests", "running")

    def __init__(self, recorder: StatsRecorder, config: SchedulerConfig) -> None:
        policy = POLICIES[config.policy]
        self.foreground, self.background = policy(), policy()
        self.running: list[Sequence] = []
        self.parked: dict[Sequence, None] = {}  # wait for transfers, out of the order of admission
        self.requests: dict[str, list[Sequence]] = {}  # the living, by request id
        self._recorder = recorder
        self._next_seq_id = 0

    def take_seq_id(self) -> int:
        """One that no other sequence ever has."""
        self._next_seq_id += 1
        return self._next_seq_id

    def queue_of(self, *, is_background: bool) -> Queue:
        """The queue in which such requests wait."""
        return self.background if is_background else self.foreground

    @property
    def first_waiting(self) -> Sequence | None:
        """The next sequence to be admitted: background work when no other waits."""
        return self.foreground.peek() or self.background.peek()

    @property
    def waiting(self) -> list[Sequence]:
        """All that wait, in the order of their admission; parked ones last."""
        return [*self.foreground, *self.background, *self.parked]

    def enqueue(self, seq: Sequence) -> None:
        """It waits, in its place."""
        self.queue_of(is_background=seq.is_background).push(seq)
        self._recorder.queued(seq, 1)

    def dequeue(self, seq: Sequence) -> None:
        """It does not wait any more."""
        if seq in self.parked:
            del self.parked[seq]
        else:
            self.queue_of(is_background=seq.is_background).remove(seq)
        self._recorder.queued(seq, -1)

    def park(self, seq: Sequence) -> None:
        """Have a new sequence wait out of order, until `unpark`."""
        self.parked[seq] = None
        self._recorder.queued(seq, 1)

    def unpark(self, seq: Sequence) -> None:
        """Have a parked sequence wait in its place."""
        del self.parked[seq]
        self.queue_of(is_background=seq.is_background).push(seq)

    def start(self, seq: Sequence) -> None:
        """It runs."""
        self.queue_of(is_background=seq.is_background).started(seq)
        insort(self.running, seq, key=_place)

    def stop(self, seq: Sequence) -> None:
        """It does not run any more."""
        self.queue_of(is_background=seq.is_background).stopped(seq)
        position = bisect_left(self.running, seq.place, key=_place)
        assert self.running[position] is seq
        del self.running[position]

    def arrange(self) -> None:
        """Have the last place be that of the first to be preempted; before any sequence may have to be."""
        self.foreground.arrange(self.running)

    def charge(self, step: InFlightStep) -> None:
        """After a commit: tenants are charged for what it has drawn."""
        self.foreground.charge(step.all_sequences)

    def takeable(self, seq: Sequence) -> list[Sequence]:
        """What may be preempted, if need be all of it, so that a waiting sequence can run; first to go first.

        Background work; else what the policy says.
        """
        if seq.is_background or not self.running:
            return []
        if num_background := self.num_background:
            return self.running[len(self.running) - num_background :][::-1]
        return self.foreground.victims(self.running, seq)

    @property
    def may_yield(self) -> bool:
        """True if the policy may name victims for a sequence that waits."""
        return self.foreground.may_yield

    @property
    def has_takeable(self) -> bool:
        """True if `takeable` may find any sequence."""
        return self.may_yield or self.num_background > 0

    def strike(self, seq: Sequence) -> None:
        """It has ended; and with the last of a request's sequences, so has the request."""
        siblings = self.requests[seq.request_id]
        siblings.remove(seq)
        if not siblings:
            del self.requests[seq.request_id]

    @property
    def has_foreground(self) -> bool:
        """True if any other than background work runs or waits."""
        return bool(self.foreground) or bool(self.running and not self.running[0].is_background)

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

    def update_gauges(self) -> None:
        """Bring the gauges up to date."""
        self._recorder.gauges(len(self.running), self.num_background)

    def holders(self, in_flight: Iterable[InFlightStep]) -> list[Sequence]:
        """Everybody who may hold something: the living, and whom a plan in flight still names."""
        holders: dict[int, Sequence] = {}
        for siblings in self.requests.values():
            for seq in siblings:
                group = seq.beam_group
                holders.update({each.seq_id: each for each in ((seq,) if group is None else group.members)})
        for step in in_flight:
            holders.update({seq.seq_id: seq for seq in step.all_sequences})
        return list(holders.values())

    def check_integrity(self) -> None:
        """Raise AssertionError if anybody stands in the wrong place."""
        assert self.running == sorted(self.running, key=_place), "those that run are out of order"
        self.foreground.check_integrity()
        self.background.check_integrity()
        if self.may_yield:
            held = Counter([seq.account for seq in self.running])
            assert all(account.num_running == num for account, num in held.items()), "a tenant's holding is miscounted"
