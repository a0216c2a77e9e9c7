"""A queue sorted by a key that never changes: the policies fcfs and priority, and the base of all others.

A key is a *virtual arrival time* in seconds: the real arrival plus a handicap. Because every waiting request ages at the
same rate, "priority minus age" orders requests exactly as "arrival plus priority" does. So nothing is ever re-sorted, and
no request can be overtaken for longer than its handicap. Therefore priority does not starve a request.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter

from engine.core.in_flight import InFlightStep
from engine.core.sequence import Account, Sequence
from engine.core.types import Request

PRIORITY_STEP_S = 10.0  # one level of priority outweighs this much waiting; so does the nearest deadline

Key = Callable[[Request], float]

by_order = attrgetter("order")


def fcfs(request: Request) -> float:
    """Return the key of fcfs: first come, first served."""
    return request.arrival_s


def priority(request: Request) -> float:
    """Return the key of priority: lower first, one level for PRIORITY_STEP_S of waiting."""
    return request.arrival_s + PRIORITY_STEP_S * request.priority


class KeyedQueue:
    """Waiting sequences sorted by a key, and the order in which running ones are preempted. Engine thread.

    Policies with state override methods. Here the running sequence with the largest key is preempted first.
    """

    may_yield = False  # whether `victims` may name any sequence

    def __init__(self, key: Key) -> None:
        self._key = key
        self._account = Account()  # of all requests
        self._waiting: list[Sequence] = []

    def key(self, request: Request) -> float:
        """Return a request's virtual arrival time.

        A deadline moves a request forward: the earlier it is, the further, by at most one level of priority.
        """
        key = self._key(request)
        return key if request.deadline_s is None else key - max(PRIORITY_STEP_S - request.deadline_s, 0.0)

    def account(self, request: Request) -> Account:  # noqa: ARG002 - for policies that charge
        """Return the account that a request is charged to."""
        return self._account

    def push(self, seq: Sequence) -> None:
        """Put a sequence in its place."""
        insort(self._waiting, seq, key=by_order)

    def peek(self) -> Sequence | None:
        """Return the next sequence to be admitted."""
        return self._waiting[0] if self._waiting else None

    def remove(self, seq: Sequence) -> None:
        """Remove a waiting sequence."""
        position = bisect_left(self._waiting, seq.order, key=by_order)
        assert self._waiting[position] is seq
        del self._waiting[position]

    def __iter__(self) -> Iterator[Sequence]:
        """Yield all in the order of admission, as if no other arrived and answers cost nothing."""
        return iter(self._waiting)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def started(self, seq: Sequence) -> None:
        """Give a started sequence its place, and charge its prompt if it starts for the first time."""

    def stopped(self, seq: Sequence) -> None:
        """Note that a sequence runs no more."""

    def charge(self, step: InFlightStep) -> None:
        """Charge the tokens that a committed step sampled."""

    def arrange(self, running: list[Sequence]) -> None:
        """Sort the running sequences so that the last is preempted first. Called before any may have to be."""

    def victims(self, running: list[Sequence], candidate: Sequence) -> list[Sequence]:  # noqa: ARG002 - for policies whose sequences may yield
        """Return sequences that may be preempted for a waiting one, the first to go first."""
        return []
