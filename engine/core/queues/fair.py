"""The policy fair: tenants share tokens and the batch by weight.

It follows Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). Each tenant has a counter of
the service it has had, divided by its weight: INPUT_COST for a prompt token when its request is admitted, OUTPUT_COST
for a token when it has been drawn. The tenant with the lowest counter is admitted next. When an idle tenant starts to
wait, its counter is raised to the lowest of those that wait already, so that idleness earns no credit. Tests hold the
policy to the paper's theorem: if two tenants wait all the time, their services, divided by weight, differ by at most
2 max(INPUT_COST * longest prompt, OUTPUT_COST * most tokens in a batch).

Prompt tokens found in the prefix cache are free, because they are not computed. So is recomputing after a preemption,
which is no service. Background work has separate counters, in a separate queue.

Slots and blocks follow a second rule, because with counters alone long answers of one tenant would keep all others out of
the batch until they end. A running sequence's place is its rank among its tenant's running sequences, divided by the
weight. So the last place is the last sequence of the tenant that holds most; it is preempted first when memory is
exhausted. It is also preempted for a waiting tenant that was served no more, and that would then hold at most
1 / YIELD_RATIO of what this one holds. Each such exchange lowers the sum of num_running^2 / weight, so exchanges end, and
none is reversed by the next. Within a tenant the order is that of the policy `priority`. Engine thread.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace

from engine.core.in_flight import InFlightStep
from engine.core.queues.keyed import KeyedQueue, by_order, priority
from engine.core.sequence import Account, Sequence
from engine.core.types import Request

INPUT_COST = 1.0
OUTPUT_COST = 2.0  # a decode step computes few tokens for all the weights it reads
YIELD_RATIO = 2.0  # holdings this far apart are evened out: less would preempt back and forth
MAX_IDLE_ACCOUNTS = 1024  # a forgotten tenant returns like a new one: with the lowest counter of all


class FairQueue(KeyedQueue):
    """A lane for each tenant, sorted by `priority`; the tenant served least is next."""

    may_yield = True

    def __init__(self) -> None:
        super().__init__(priority)
        self._accounts: dict[str, Account] = {}  # by tenant
        self._lanes: dict[Account, list[Sequence]] = {}  # a lane is there while a sequence waits in it
        self._last_left = Account()  # of the sequence that left the queue last

    def account(self, request: Request) -> Account:
        account = self._accounts.get(request.tenant)
        if account is None:
            if len(self._accounts) >= MAX_IDLE_ACCOUNTS:
                held = {*self._lanes, *(each for each in self._accounts.values() if each.num_running)}
                self._accounts = {tenant: each for tenant, each in self._accounts.items() if each in held}
            account = self._accounts[request.tenant] = Account()
        account.weight = request.weight
        return account

    def push(self, seq: Sequence) -> None:
        """Put a sequence in its lane. A tenant that did not wait gets no credit for it."""
        account = seq.account
        if account not in self._lanes:
            floor = min([other.served for other in self._lanes], default=self._last_left.served)
            account.served = max(account.served, floor)
        insort(self._lanes.setdefault(account, []), seq, key=by_order)

    def remove(self, seq: Sequence) -> None:
        account = seq.account
        lane = self._lanes[account]
        position = bisect_left(lane, seq.order, key=by_order)
        assert lane[position] is seq
        del lane[position]
        if not lane:
            del self._lanes[account]
        self._last_left = account

    def peek(self) -> Sequence | None:
        """Return the first of the tenant served least; of equals, of the one that holds least."""
        lanes = self._lanes
        if len(lanes) <= 1:
            return next(iter(lanes.values()))[0] if lanes else None
        least = min([account.served for account in lanes])
        alike = [account for account in lanes if account.served == least]
        return lanes[min(alike, key=lambda account: (account.share, lanes[account][0].order))][0]

    def __iter__(self) -> Iterator[Sequence]:
        heap = [(account.served, account.share, lane[0].order, 0, account) for account, lane in self._lanes.items()]
        heapify(heap)
        while heap:
            served, share, _, index, account = heap[0]
            lane = self._lanes[account]
            yield lane[index]
            if index + 1 == len(lane):
                heappop(heap)
                continue
            served += INPUT_COST * lane[index].num_prompt / account.weight
            heapreplace(heap, (served, share, lane[index + 1].order, index + 1, account))

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def started(self, seq: Sequence) -> None:
        account = seq.account
        account.num_running += 1
        if not seq.num_charged:
            seq.num_charged = seq.num_prompt
            account.charge(INPUT_COST * (seq.num_prompt - seq.num_computed))
        seq.place = _place(seq, account.num_running)

    def stopped(self, seq: Sequence) -> None:
        seq.account.num_running -= 1

    def charge(self, step: InFlightStep) -> None:
        for seq in step.all_sequences:
            drawn = len(seq.tokens) - seq.num_charged
            if drawn > 0:
                seq.num_charged += drawn
                seq.account.charge(OUTPUT_COST * drawn)

    def arrange(self, running: list[Sequence]) -> None:
        """Sort by rank: the first sequences of all tenants come first, then the second ones, and so on."""
        seen = Counter[Account]()
        running.sort(key=by_order)
        for seq in running:
            seen[seq.account] += 1
            seq.place = _place(seq, seen[seq.account])
        running.sort(key=lambda seq: seq.place)

    def victims(self, running: list[Sequence], candidate: Sequence) -> list[Sequence]:
        """Return sequences of tenants that hold far more than the candidate's and were served no less."""
        account, found = candidate.account, list[Sequence]()
        least = YIELD_RATIO * (account.num_running + candidate.num_slots) / account.weight
        num_left = {
            other: other.num_running
            for other in {holder.account for holder in running}
            if other is not account and other.served >= account.served and other.share >= least
        }
        if num_left:
            self.arrange(running)
            for victim in reversed(running):
                other = victim.account
                if other not in num_left or num_left[other] / other.weight < least:
                    continue
                # Two that preempt each other would do so without end: the candidate has to be the next to be admitted.
                num_kept = num_left[other] - (1 if victim.beam_group is None else len(victim.beam_group.members))
                ours, theirs = account.share, max(num_kept, 0) / other.weight
                if (account.served, ours, candidate.order) < (other.served, theirs, victim.order):
                    num_left[other] -= 1
                    found.append(victim)
        return found


def _place(seq: Sequence, rank: int) -> tuple[float, ...]:
    """Return the place of a tenant's rank-th running sequence, from 1; background work comes last.

    The beams of a search stand behind its first one. They are preempted together: if they stood apart, two searches could
    preempt each other without end.
    """
    first = seq.first_beam
    return (seq.is_background, rank / seq.account.weight if first is seq else first.place[1], *seq.order)
