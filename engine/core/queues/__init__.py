"""Scheduling policies: the order of admission and of preemption.

A policy is one line of POLICIES. The scheduler makes two queues of the chosen policy. Background work waits in the second,
which is served when the first is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

from engine.core.queues.fair import FairQueue
from engine.core.queues.keyed import KeyedQueue, fcfs, priority
from engine.core.queues.shortest import ShortestQueue

if TYPE_CHECKING:
    from engine.core.sequence import Account, Sequence
    from engine.core.types import Request


class Queue(Protocol):
    """The waiting sequences under one policy, and its order of those that run. Owned by the scheduler, engine thread."""

    may_yield: bool  # whether `victims` may name any sequence

    def expect(self, request: Request) -> float | None:
        """Return how many tokens an answer is expected to have, if the policy predicts that."""
        ...

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
        """Return the next sequence to be admitted."""
        ...

    def remove(self, seq: Sequence) -> None:
        """Remove a waiting sequence."""
        ...

    def __iter__(self) -> Iterator[Sequence]:
        """Yield all in the order of admission, as if no other arrived and answers cost nothing."""
        ...

    def __bool__(self) -> bool: ...

    def started(self, seq: Sequence) -> None:
        """Give a started sequence its place, and charge its prompt if it starts for the first time."""
        ...

    def stopped(self, seq: Sequence) -> None:
        """Note that a sequence runs no more."""
        ...

    def charge(self, sequences: Iterable[Sequence]) -> None:
        """Charge the tokens that a committed step sampled."""
        ...

    def completed(self, seq: Sequence, num_generated: int, *, is_cut: bool) -> None:
        """Learn from an answer that was completed, by itself or because max_tokens `is_cut` it."""
        ...

    def arrange(self, running: list[Sequence]) -> None:
        """Sort the running sequences so that the last is preempted first. Called before any may have to be."""
        ...

    def victims(self, running: list[Sequence], candidate: Sequence) -> list[Sequence]:
        """Return sequences that may be preempted for a waiting one, the first to go first."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError if a sequence is in the wrong place."""
        ...


POLICIES: Mapping[str, Callable[[], Queue]] = {
    "fcfs": partial(KeyedQueue, fcfs),
    "sjf": ShortestQueue,
    "priority": partial(KeyedQueue, priority),
    "fair": FairQueue,
}
