"""Who waits: one lane for each account, sorted by `order`; the next one is the first of the account served least.

With `fair` each tenant has an account, and another one for its background; with all other policies everybody shares one,
so that the queue is one list in the policy's order, and the counters have nothing to say. The foreground comes before
the background. Owned by the roster, engine thread.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace
from operator import attrgetter

from engine.core.account import Account
from engine.core.fairness import INPUT_COST
from engine.core.sequence import Sequence
from engine.core.types import Request

MAX_IDLE_ACCOUNTS = 1024  # a tenant that is forgotten comes back as a new one does: at the least counter of all

_order = attrgetter("order")


class WaitingQueue:
    """add and remove sequences; `first` is who is next."""

    __slots__ = ("_accounts", "_is_fair", "_lanes", "_last_left")

    def __init__(self, *, is_fair: bool) -> None:
        self._is_fair = is_fair
        self._accounts: dict[tuple[bool, str], Account] = {}
        # Foreground and background. A lane is there while somebody stands in it.
        self._lanes: tuple[dict[Account, list[Sequence]], ...] = ({}, {})
        self._last_left = [Account(), Account()]  # of either, whose sequence was the last to wait no more

    def account(self, request: Request) -> Account:
        """The one that a request is charged to."""
        key = (request.is_background, request.tenant if self._is_fair else "")
        account = self._accounts.get(key)
        if account is None:
            if len(self._accounts) >= MAX_IDLE_ACCOUNTS:
                self._forget_idle()
            account = self._accounts[key] = Account()
        account.weight = request.weight
        return account

    def _forget_idle(self) -> None:
        self._accounts = {
            key: account
            for key, account in self._accounts.items()
            if account.num_running or account in self._lanes[key[0]]
        }

    def add(self, seq: Sequence) -> None:
        """It waits, in its place. Whoever has not waited until now is lifted: nobody saves up service by staying away."""
        account, is_background = seq.account, seq.is_background
        lanes = self._lanes[is_background]
        if account not in lanes:
            floor = min([other.served for other in lanes], default=self._last_left[is_background].served)
            account.served = max(account.served, floor)
        self._line_up(seq)

    def remove(self, seq: Sequence) -> None:
        """It does not wait any more."""
        self._step_out(seq)
        self._last_left[seq.is_background] = seq.account

    def _line_up(self, seq: Sequence) -> None:
        insort(self._lanes[seq.is_background].setdefault(seq.account, []), seq, key=_order)

    def _step_out(self, seq: Sequence) -> None:
        account, lanes = seq.account, self._lanes[seq.is_background]
        lane = lanes[account]
        position = bisect_left(lane, seq.order, key=_order)
        assert lane[position] is seq
        del lane[position]
        if not lane:
            del lanes[account]

    @property
    def first(self) -> Sequence | None:
        """Who is to be admitted next. Of tenants served alike, the one that holds least, then the one that came first."""
        lanes = self._lanes[0] or self._lanes[1]
        if len(lanes) <= 1:
            return next(iter(lanes.values()))[0] if lanes else None
        least = min([account.served for account in lanes])
        alike = [account for account in lanes if account.served == least]
        return lanes[min(alike, key=lambda account: (account.share, lanes[account][0].order))][0]

    @property
    def has_foreground(self) -> bool:
        return bool(self._lanes[0])

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, in the order of their admission if no other arrived and answers cost nothing."""
        for lanes in self._lanes:
            heap = [(account.served, account.share, lane[0].order, 0, account) for account, lane in lanes.items()]
            heapify(heap)
            while heap:
                served, share, _, index, account = heap[0]
                lane = lanes[account]
                yield lane[index]
                if index + 1 == len(lane):
                    heappop(heap)
                    continue
                served += INPUT_COST * lane[index].num_prompt / account.weight
                heapreplace(heap, (served, share, lane[index + 1].order, index + 1, account))

    def check_integrity(self) -> None:
        """Raise AssertionError if anybody stands in the wrong place."""
        for is_background, lanes in enumerate(self._lanes):
            for account, lane in lanes.items():
                assert lane, "a lane is empty"
                assert lane == sorted(lane, key=_order), "a lane is out of order"
                assert all(seq.account is account and seq.is_background == is_background for seq in lane), (
                    "a lane is mixed"
                )
