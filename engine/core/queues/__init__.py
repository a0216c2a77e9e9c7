"""Scheduling policies: who is admitted next, and who is preempted first. A policy is one queue, and one line here.

There are two queues of a policy: background work waits in the second, which is served when the first is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

from engine.core.queues.fair import FairQueue
from engine.core.queues.keyed import KeyedQueue, fcfs, priority, sjf

if TYPE_CHECKING:
    from engine.core.sequence import Account, Sequence
    from engine.core.types import Request


class Queue(Protocol):
    """What waits under one policy, and what the policy says of what runs. Owned by the scheduler, engine thread."""

    may_yield: bool  # whether `victims` may name any sequence

    def key(self, request: Request, num_expected: float | None) -> float:
        """Return a request's virtual arrival time; None expects max_tokens of its answers."""
        ...

    def account(self, request: Request) -> Account:
        """Return the account that a request is charged to."""
        ...

    def push(self, seq: Sequence) -> None:
        """Put a sequence in its place."""
        ...

    def peek(self) -> Sequence | None:
        """Return the next one to be admitted."""
        ...

    def remove(self, seq: Sequence) -> None:
        """Take a waiting sequence out."""
        ...

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, in the order of their admission if no other arrived and answers cost nothing."""
        ...

    def __bool__(self) -> bool: ...

    def started(self, seq: Sequence) -> None:
        """A sequence runs from now on: charge its prompt if it does for the first time, and give it its place."""
        ...

    def stopped(self, seq: Sequence) -> None:
        """A sequence does not run any more."""
        ...

    def charge(self, sequences: Iterable[Sequence]) -> None:
        """A step was committed: charge what it has drawn."""
        ...

    def arrange(self, running: list[Sequence]) -> None:
        """Sort what runs so that the last is the first to be preempted. Called before any sequence may have to be."""
        ...

    def victims(self, running: list[Sequence], candidate: Sequence) -> list[Sequence]:
        """Return what may be preempted, all of it if need be, so that a waiting sequence can run; first to go first."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError if a sequence is in the wrong place."""
        ...


POLICIES: Mapping[str, Callable[[], Queue]] = {
    "fcfs": partial(KeyedQueue, fcfs),
    "sjf": partial(KeyedQueue, sjf),
    "priority": partial(KeyedQueue, priority),
    "fair": FairQueue,
}
