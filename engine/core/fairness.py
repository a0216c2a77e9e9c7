"""Sharing between tenants, token by token: virtual token counters, and how much of the batch a tenant holds.

The policy `fair` follows Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). Each tenant has a counter of
the service it has had, divided by its weight: INPUT_COST for a prompt token when its request is admitted, OUTPUT_COST
for a token when it has been drawn. Whoever has the least is admitted next. A tenant that comes to wait is lifted to the
least of those that wait already, so that idleness earns no credit, and a tenant alone gets everything. This gives the
theorem that tests hold us to: of two tenants that wait all the time, neither gets more service than the other, weight
for weight, than by 2 max(INPUT_COST * longest prompt, OUTPUT_COST * tokens that a batch holds at most).

Start-time fair queueing would have kept keys fixed at arrival, but only by guessing how long an answer will be, and a
tenant that guesses (or lies) low in max_tokens gains by it. Counters charge what was really served.

What is free: prompt tokens found in the prefix cache, for nobody computed them, and all that is computed anew after a
preemption, for that is no service. The background has counters of its own: it takes steps that nobody else wants.

Seats and blocks follow a second rule, for counters alone would let long answers of one tenant keep everybody else from
the batch until they end. A sequence's place among the running is how many of its own tenant's stand before it, divided by
the weight: the last place is the last sequence of whoever holds most, and it goes first when memory is exhausted. It also
goes if a tenant waits that was served no more and would hold, with the newcomer, at most 1 / YIELD_RATIO of what this
one does. That ratio is the hysteresis: each such exchange lowers the sum of num_running^2 / weight, so exchanges come to
an end by themselves, and none is ever taken back at once.

Within a tenant `priority` orders, with its aging. Pure functions; the roster and its
queue call them, engine thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.core.account import Account
from engine.core.sequence import Sequence

INPUT_COST = 1.0
OUTPUT_COST = 2.0  # a decode step computes few tokens for all the weights it reads
YIELD_RATIO = 2.0


def charge_generated(sequences: Iterable[Sequence]) -> None:
    """After a step: charge what it has drawn for whom."""
    for seq in sequences:
        drawn = len(seq.tokens) - seq.num_charged
        if drawn > 0:
            seq.num_charged += drawn
            seq.account.charge(OUTPUT_COST * drawn)


def interleave(running: list[Sequence]) -> None:
    """Give those that run their places and sort them: all tenants' first ones, then the second ones, and so on."""
    seen: dict[Account, int] = {}
    running.sort(key=lambda seq: seq.order)
    for seq in running:
        account = seq.account
        rank = seen[account] = seen.get(account, 0) + 1
        seq.place = place_of(seq, rank)
    running.sort(key=lambda seq: seq.place)


def place_of(seq: Sequence, rank: int) -> tuple[float, ...]:
    """The place of its tenant's rank-th sequence, from 1; the background stands behind all others, as everywhere."""
    return (seq.is_background, rank / seq.account.weight, *seq.order)


def takeable(running: list[Sequence], seq: Sequence) -> list[Sequence]:
    """Of those that run, whoever may be preempted so that a waiting one can run; first to go first."""
    account, found = seq.account, list[Sequence]()
    least = YIELD_RATIO * (account.num_running + seq.num_seats) / account.weight
    num_left = {
        other: other.num_running
        for other in {holder.account for holder in running}
        if other is not account and other.served >= account.served and other.share >= least
    }
    if num_left:
        interleave(running)
        for victim in reversed(running):
            other = victim.account
            if other in num_left and num_left[other] / other.weight >= least:
                num_left[other] -= 1
                found.append(victim)
    return found
