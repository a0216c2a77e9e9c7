"""How many replicas a workload needs within its targets: all alike, or in two tiers of which all splits are tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from engine.core.config import SchedulerConfig
from loadtest.report import Spread
from loadtest.simulation.costs import StepCosts
from loadtest.simulation.figures import Targets
from loadtest.simulation.replay import History, replay
from loadtest.simulation.replica import Replica
from loadtest.simulation.routers import Router
from loadtest.simulation.tiers import replay_tiers
from loadtest.simulation.trace import TraceRequest


class Fleet(NamedTuple):
    """So many replicas: all alike where none is for prefill alone."""

    num_prefill: int
    num_decode: int

    @property
    def total(self) -> int:
        return self.num_prefill + self.num_decode

    @property
    def is_tiered(self) -> bool:
        return self.num_prefill > 0

    def __str__(self) -> str:
        return f"{self.num_prefill} + {self.num_decode}" if self.is_tiered else str(self.num_decode)


class Tried(NamedTuple):
    """What came of a fleet. Seconds."""

    fleet: Fleet
    good_ratio: float  # of all requests, those within the targets
    ttft_s: Spread
    tpot_s: Spread


class Sizing:
    """One workload, tried on fleets of growing size."""

    def __init__(
        self,
        rows: Sequence[TraceRequest],
        config: SchedulerConfig,
        costs: StepCosts,
        *,
        router: Router,
        targets: Targets,
        depth: int = 0,
        new_replica: Callable[..., Replica] = Replica,
    ) -> None:
        self._rows, self._config, self._costs, self._router, self._targets = rows, config, costs, router, targets
        self._depth, self._new_replica = depth, new_replica

    def search(self, most: int, share: float) -> Iterator[Tried]:
        """Fleets of one replica, of two, ... until one of either kind has its `share` of good answers, or `most` are tried.

        Of a number of replicas all splits are tried, since what is too few of one tier another number may be too few of the
        other; a kind that is done is tried no further.
        """
        is_done = {False: False, True: False}
        for total in range(1, most + 1):
            good = []
            for num_prefill in range(total):
                fleet = Fleet(num_prefill, total - num_prefill)
                if not is_done[fleet.is_tiered]:
                    tried = self.run(fleet)
                    good += [fleet] * (tried.good_ratio >= share)
                    yield tried
            for fleet in good:
                is_done[fleet.is_tiered] = True
            if all(is_done.values()):
                return

    def run(self, fleet: Fleet) -> Tried:
        """One fleet."""
        served = self._replay(fleet).served
        return Tried(
            fleet,
            sum(map(self._targets.met_by, served)) / len(self._rows),
            Spread.of(each.ttft_s for each in served),
            Spread.of(each.tpot_s for each in served if each.num_tokens > 1),
        )

    def _replay(self, fleet: Fleet) -> History:
        work = self._rows, self._config, self._costs
        if not fleet.is_tiered:
            return replay(
                *work,
                num_replicas=fleet.num_decode,
                router=self._router,
                depth=self._depth,
                new_replica=self._new_replica,
            )
        return replay_tiers(
            *work, num_prefill=fleet.num_prefill, num_decode=fleet.num_decode, router=self._router, depth=self._depth,
            new_replica=self._new_replica,
        )  # fmt: skip


def smallest(found: Sequence[Tried], share: float, *, is_tiered: bool) -> Tried | None:
    """Of the fleets of a kind with their share of good answers the smallest; of equals, the best."""
    good = [each for each in found if each.fleet.is_tiered is is_tiered and each.good_ratio >= share]
    return min(good, key=lambda each: (each.fleet.total, -each.good_ratio), default=None)


def best_by_total(found: Sequence[Tried], *, is_tiered: bool) -> dict[int, Tried]:
    """By number of replicas, the best of a kind."""
    best: dict[int, Tried] = {}
    for each in found:
        total = each.fleet.total
        if each.fleet.is_tiered is is_tiered and (total not in best or each.good_ratio > best[total].good_ratio):
            best[total] = each
    return best
