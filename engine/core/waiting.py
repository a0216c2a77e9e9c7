"""Who waits: one lane for each account, sorted by `order`; the next one is the first of the account served least.

With `fair` each tenant has an account, and another one for its background; with all other policies everybody shares one,
so that the queue is one list in the policy's order, and the counters have nothing to say. The foreground comes before
the background. Owned by the roster, engine thread.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace
from itertools import islice
from operator import attrgetter

from engine.core.account import Account
from engine.core.fairness import INPUT_COST
from engine.core.sequence import Sequence
from engine.core.types import Request

MAX_IDLE_ACCOUNTS = 1024  # a tenant that is forgotten comes back as a new one does: at the least counter of all

_order = attrgetter("order")


class WaitingQueue:
    """add and remove sequences; `first` is who is next."""

    __slots__ = ("_accounts", "_aside", "_held", "_is_fair", "_lanes", "_last_left", "_released")

    def __init__(self, *, is_fair: bool) -> None:
        self._is_fair = is_fair
        self._accounts: dict[tuple[bool, str], Account] = {}
        # Foreground and background. A lane is there while somebody stands in it.
        self._lanes: tuple[dict[Account, list[Sequence]], ...] = ({}, {})
        # Those that are passed over wait, too, though in no lane; and how many of them each account has.
        self._aside: tuple[Counter[Account], ...] = (Counter(), Counter())
        self._held: dict[Sequence, None] = {}
        self._released: dict[Sequence, None] = {}  # of those that were held, who is to be in line again, a few a step
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
            if account.num_running or account in self._lanes[key[0]] or account in self._aside[key[0]]
        }

    def add(self, seq: Sequence) -> None:
        """It waits, in its place. Whoever has not waited until now is lifted: nobody saves up service by staying away."""
        account, is_background = seq.account, seq.is_background
        lanes, aside = self._lanes[is_background], self._aside[is_background]
        if account not in lanes and account not in aside:
            floor = min([other.served for other in (*lanes, *aside)], default=self._last_left[is_background].served)
            account.served = max(account.served, floor)
        self._line_up(seq)

    def remove(self, seq: Sequence) -> None:
        """It does not wait any more."""
        for passed_over in (self._held, self._released):
            if seq in passed_over:
                del passed_over[seq]
                self._count_out(seq)
                break
        else:
            self._step_out(seq)
        self._last_left[seq.is_background] = seq.account

    def hold(self, seq: Sequence, *, is_released: bool = False) -> None:
        """Have a sequence be passed over, until `release` and `recall`. Its tenant keeps what it is owed meanwhile."""
        self._step_out(seq)
        self._aside[seq.is_background][seq.account] += 1
        (self._released if is_released else self._held)[seq] = None

    def release(self) -> None:
        """Whoever was passed over may be recalled."""
        if self._held:
            self._released |= self._held
            self._held.clear()

    def recall(self, most: int) -> None:
        """Of those that were released, have at most so many be in line again: whoever was passed over first."""
        if self._released:
            for seq in list(islice(self._released, most)):
                del self._released[seq]
                self._count_out(seq)
                self._line_up(seq)

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

    def _count_out(self, seq: Sequence) -> None:
        account, aside = seq.account, self._aside[seq.is_background]
        aside[account] -= 1
        if not aside[account]:
            del aside[account]

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
        """All that wait, as they would be admitted if nobody else came and answers cost nothing; first who is held."""
        yield from self._held
        yield from self._released
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
        assert self._held.keys().isdisjoint(self._released), "somebody is passed over twice"
        aside = Counter([(seq.is_background, seq.account) for seq in (*self._held, *self._released)])
        counts = {(is_last, account): num for is_last in (False, True) for account, num in self._aside[is_last].items()}
        assert counts == aside, "those passed over are miscounted"
        for is_background, lanes in enumerate(self._lanes):
            for account, lane in lanes.items():
                assert lane, "a lane is empty"
                assert lane == sorted(lane, key=_order), "a lane is out of order"
                assert all(seq.account is account and seq.is_background == is_background for seq in lane), (
                    "a lane is mixed"
                )
