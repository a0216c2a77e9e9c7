"""The running sequences, the waiting ones, and all living ones by request. Engine thread.

Running sequences are sorted by `place`: best first, victims last.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from math import inf
from operator import attrgetter

from engine.core.config import SchedulerConfig
from engine.core.in_flight import InFlightStep
from engine.core.queues import make_queue
from engine.core.queues.keyed import KeyedQueue
from engine.core.scheduling.stats_recorder import StatsRecorder
from engine.core.sequence import Sequence, Status
from engine.core.types import Request

_place = attrgetter("place")
_is_background = attrgetter("is_background")


class RunningQueue:
    """Moves sequences between the waiting queues, the parked ones and the running ones."""

    def __init__(self, recorder: StatsRecorder, config: SchedulerConfig) -> None:
        self.foreground, self.background = make_queue(config.policy), make_queue(config.policy)
        self.may_yield = self.foreground.may_yield  # the policy may name victims for a waiting sequence
        self.running: list[Sequence] = []
        self.parked: dict[Sequence, None] = {}  # wait for transfers or leaders, outside the order of admission
        self.followers: dict[Sequence, tuple[Sequence, int]] = {}  # of those: the leader, and the positions to wait for
        self.requests: dict[str, list[Sequence]] = {}  # the living, by request id
        self.num_with_spans = 0  # requests
        self.num_queued = 0  # sequences in both waiting queues
        self._recorder = recorder
        self._next_seq_id = 0

    def take_seq_id(self) -> int:
        """Return an id that no other sequence ever has."""
        self._next_seq_id += 1
        return self._next_seq_id

    def queue_of(self, request: Request) -> KeyedQueue:
        """Return the queue in which a request waits."""
        return self.background if request.is_background else self.foreground

    @property
    def first_waiting(self) -> Sequence | None:
        """Return the next sequence to be admitted: background work if no other waits."""
        return self.foreground.peek() or self.background.peek()

    @property
    def waiting(self) -> list[Sequence]:
        """Return all waiting sequences in the order of admission, parked ones last."""
        return [*self.foreground, *self.background, *self.parked]

    def enqueue(self, seq: Sequence, *, is_parked: bool = False) -> None:
        """Add a sequence to its waiting queue, or hold it outside until `unpark`."""
        if is_parked:
            self.parked[seq] = None
        else:
            self._push(seq)
        self._recorder.queued(seq, 1)

    def dequeue(self, seq: Sequence) -> None:
        """Remove a waiting sequence."""
        if seq in self.parked:
            del self.parked[seq]
            self.followers.pop(seq, None)
        else:
            self._remove(seq)
        self._recorder.queued(seq, -1)

    def _push(self, seq: Sequence) -> None:
        self.queue_of(seq.request).push(seq)
        self.num_queued += 1

    def _remove(self, seq: Sequence) -> None:
        self.queue_of(seq.request).remove(seq)
        self.num_queued -= 1

    def park(self, seq: Sequence) -> None:
        """Hold a waiting sequence outside of its queue until `unpark`."""
        self._remove(seq)
        self.parked[seq] = None

    def follow(self, seq: Sequence, leader: Sequence, num_positions: int) -> None:
        """Hold a waiting sequence until a running one has computed so many positions, of which it needs some, too."""
        self.park(seq)
        seq.kv.awaits_until_s = inf
        self.followers[seq] = leader, num_positions

    def release_followers(self) -> None:
        """Move the sequences to their waiting queues whose leaders have computed these positions, or will not."""
        running = (Status.PREFILL, Status.RUNNING)
        waits = self.followers.items()
        self.unpark([seq for seq, (each, num) in waits if each.num_computed >= num or each.status not in running])

    def unpark(self, sequences: Iterable[Sequence]) -> None:
        """Move those of these sequences that are parked to their waiting queues."""
        for seq in sequences:
            if seq in self.parked:
                del self.parked[seq]
                self.followers.pop(seq, None)
                self._push(seq)

    def start(self, seq: Sequence) -> None:
        """Add a sequence to the running ones."""
        self.queue_of(seq.request).started(seq)
        self._recorder.ran(seq, 1)
        insort(self.running, seq, key=_place)

    def stop(self, seq: Sequence) -> None:
        """Remove a running sequence."""
        self.queue_of(seq.request).stopped(seq)
        self._recorder.ran(seq, -1)
        position = bisect_left(self.running, seq.place, key=_place)
        assert self.running[position] is seq
        del self.running[position]

    def takeable(self, seq: Sequence) -> list[Sequence]:
        """Return the sequences that may be preempted for a waiting one, background work first."""
        if seq.is_background or not self.running:
            return []
        if num_background := self.num_background:
            return self.running[len(self.running) - num_background :][::-1]
        return self.foreground.victims(self.running, seq)

    @property
    def has_takeable(self) -> bool:
        """Return whether `takeable` may find any sequence."""
        return self.may_yield or self.num_background > 0

    def strike(self, seq: Sequence) -> None:
        """Remove an ended sequence from its request, and the request with its last one."""
        siblings = self.requests[seq.request_id]
        siblings.remove(seq)
        if not siblings:
            del self.requests[seq.request_id]
            self.num_with_spans -= bool(seq.request.spans)

    @property
    def has_foreground(self) -> bool:
        """Return whether any work but background work runs or waits."""
        return bool(self.running and not self.running[0].is_background) or bool(self.foreground)

    @property
    def is_seen(self) -> bool:
        """Return whether there is any request but those that are held."""
        return any(not siblings[0].request.is_held for siblings in self.requests.values())

    @property
    def num_background(self) -> int:
        """Return how many background sequences run; they come last."""
        if not (self.running and self.running[-1].is_background):
            return 0
        return len(self.running) - bisect_left(self.running, True, key=_is_background)

    def due(self, limit: int) -> list[Sequence]:
        """Return the best running sequences that can be planned; background work pauses for other work."""
        due = self.running.copy()
        if due and due[-1].is_background and self.has_foreground:
            del due[-self.num_background :]
        if len(due) <= limit:
            return due
        return [seq for seq in due if not seq.is_waiting][:limit]

    def update_gauges(self) -> None:
        """Bring the gauges up to date."""
        self._recorder.gauges(len(self.running), self.num_background)

    def holders(self, in_flight: Iterable[InFlightStep]) -> list[Sequence]:
        """Return all sequences that may hold blocks: the living, and those that a step in flight names."""
        holders: dict[int, Sequence] = {}
        for siblings in self.requests.values():
            for seq in siblings:
                group = seq.beam_group
                holders.update({each.seq_id: each for each in ((seq,) if group is None else group.members)})
        for step in in_flight:
            holders.update({seq.seq_id: seq for seq in step.all_sequences})
        return list(holders.values())
