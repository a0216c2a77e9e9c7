"""A queue sorted by a key that never changes: the policies fcfs and priority.

The policy sjf (shortest.py) extends it.

A key is a *virtual arrival time* in seconds: the real arrival plus a handicap. Because every waiting request ages at the
same rate, "priority minus age" orders requests exactly as "arrival plus priority" does. So nothing is ever re-sorted, and
no request can be overtaken for longer than its handicap. Therefore priority and sjf do not starve a request; sjf's
handicap is at most MAX_WORK_S.

Under every policy a deadline moves a request forward: the earlier the deadline, the further, by at most DEADLINE_S. So
only requests that arrive within DEADLINE_S after another one can overtake it by their deadlines.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

from engine.core.sequence import Account

if TYPE_CHECKING:
    from engine.core.sequence import Sequence
    from engine.core.types import Request

PRIORITY_STEP_S = 10.0  # one level of priority outweighs this much waiting
TOKEN_STEP_S = 0.05  # sjf: one expected token of work outweighs this much waiting
MAX_WORK_S = 60.0  # ... and all of them no more than this
DEADLINE_S = 10.0  # the most that a deadline moves a request forward; one this far away moves it not at all

Key = Callable[["Request", float], float]  # of a request, and how many tokens one of its answers is expected to have

by_order = attrgetter("order")


def fcfs(request: Request, num_expected: float) -> float:  # noqa: ARG001 - a key's parameters
    """Return the key of fcfs: first come, first served."""
    return request.arrival_s


def sjf(request: Request, num_expected: float) -> float:
    """Return the key of sjf: the shortest prompt and expected answers first; shortest.py predicts them."""
    work_s = TOKEN_STEP_S * (len(request.prompt) + request.params.num_sequences * num_expected)
    return request.arrival_s + min(work_s, MAX_WORK_S)


def priority(request: Request, num_expected: float) -> float:  # noqa: ARG001 - a key's parameters
    """Return the key of priority: lower first; a request gains one level for every PRIORITY_STEP_S it waits."""
    return request.arrival_s + PRIORITY_STEP_S * request.priority


def sort_key(key: Key, request: Request, num_expected: float | None = None) -> float:
    """Return a request's key, its deadline considered. With None, max_tokens are expected."""
    found = key(request, request.params.max_tokens if num_expected is None else num_expected)
    return found if request.deadline_s is None else found - max(DEADLINE_S - request.deadline_s, 0.0)


class KeyedQueue:
    """A Queue sorted by a key. Running sequences are preempted in its order, the largest key first."""

    may_yield = False

    def __init__(self, key: Key) -> None:
        self._key = key
        self._account = Account()  # of all requests
        self._waiting: list[Sequence] = []

    def expect(self, request: Request) -> float | None:  # noqa: ARG002 - see Queue
        """See Queue."""
        return None

    def key(self, request: Request, num_expected: float | None) -> float:
        """See Queue."""
        return sort_key(self._key, request, num_expected)

    def account(self, request: Request) -> Account:  # noqa: ARG002 - see Queue
        """See Queue."""
        return self._account

    def push(self, seq: Sequence) -> None:
        """See Queue."""
        insort(self._waiting, seq, key=by_order)

    def peek(self) -> Sequence | None:
        """See Queue."""
        return self._waiting[0] if self._waiting else None

    def remove(self, seq: Sequence) -> None:
        """See Queue."""
        position = bisect_left(self._waiting, seq.order, key=by_order)
        assert self._waiting[position] is seq
        del self._waiting[position]

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def started(self, seq: Sequence) -> None:
        """See Queue."""

    def stopped(self, seq: Sequence) -> None:
        """See Queue."""

    def charge(self, sequences: Iterable[Sequence]) -> None:
        """See Queue."""

    def completed(self, seq: Sequence, num_generated: int, *, is_cut: bool) -> None:
        """See Queue."""

    def arrange(self, running: list[Sequence]) -> None:
        """See Queue."""

    def victims(self, running: list[Sequence], candidate: Sequence) -> list[Sequence]:  # noqa: ARG002 - see Queue
        """See Queue."""
        return []

    def check_integrity(self) -> None:
        """See Queue."""
        assert self._waiting == sorted(self._waiting, key=by_order), "the queue is out of order"
