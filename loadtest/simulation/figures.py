"""The figures of a replay: latencies, goodput and memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from loadtest.report import QUANTILES, Spread
from loadtest.simulation.recording import Replayed
from loadtest.simulation.replay import History, Served

_NEVER = Spread(math.nan, math.nan, math.nan, math.nan, 0)


class Targets(NamedTuple):
    """The highest latencies of a good answer, in seconds."""

    ttft_s: float
    tpot_s: float

    def met_by(self, served: Served) -> bool:
        return served.ttft_s <= self.ttft_s and (served.num_tokens == 1 or served.tpot_s <= self.tpot_s)


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a replay. Times are simulated seconds."""

    num_served: int
    num_refused: int
    num_rejected: int
    num_dropped: int
    end_s: float
    output_tokens_per_s: float
    ttft_s: Spread
    tpot_s: Spread
    itl_s: Spread
    e2e_s: Spread
    goodput_ratio: float  # the share of all requests that met both targets
    goodput_per_s: float
    preemptions: int
    prefix_hit_ratio: float
    busy_ratio: float
    mean_blocks_held: float
    most_blocks_held: int
    most_waiting: int
    sequence_steps: int
    cpu_s: float
    tenants: dict[str, TenantFigures]


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """The figures of one tenant's requests."""

    num_served: int
    ttft_s: Spread
    tpot_s: Spread
    e2e_s: Spread
    goodput_ratio: float


def summarize(history: History, targets: Targets) -> Figures:
    """Return all figures of a replay."""
    served, replicas = history.served, history.replicas
    stats = [replica.stats for replica in replicas]
    samples = [sample for replica in replicas for sample in replica.samples]
    num_all = len(served) + history.num_rejected + history.num_dropped + sum(history.refused.values())
    num_good = sum(map(targets.met_by, served))
    end_s = history.end_s
    queried = sum(each.prefix_queried_tokens for each in stats)
    by_tenant: dict[str, list[Served]] = defaultdict(list)
    for each in served:
        by_tenant[each.row.tenant].append(each)
    tenants = {name: _of_tenant(by_tenant[name], targets) for name in sorted(by_tenant)} if len(by_tenant) > 1 else {}
    return Figures(
        num_served=len(served),
        num_refused=sum(history.refused.values()),
        num_rejected=history.num_rejected,
        num_dropped=history.num_dropped,
        end_s=end_s,
        output_tokens_per_s=sum(each.num_tokens for each in served) / end_s if end_s else 0.0,
        ttft_s=Spread.of(each.ttft_s for each in served),
        tpot_s=Spread.of(each.tpot_s for each in served if each.num_tokens > 1),
        itl_s=_weighted([replica.gaps.times for replica in replicas]),
        e2e_s=Spread.of(each.e2e_s for each in served),
        goodput_ratio=num_good / num_all if num_all else math.nan,
        goodput_per_s=num_good / end_s if end_s else 0.0,
        preemptions=sum(each.preemptions for each in stats),
        prefix_hit_ratio=sum(each.prefix_hit_tokens for each in stats) / queried if queried else 0.0,
        busy_ratio=sum(replica.busy_s for replica in replicas) / (end_s * len(replicas)) if end_s else 0.0,
        mean_blocks_held=sum(sample.blocks_held for sample in samples) / len(samples) if samples else 0.0,
        most_blocks_held=max((sample.blocks_held for sample in samples), default=0),
        most_waiting=max((sample.num_waiting for sample in samples), default=0),
        sequence_steps=history.num_sequence_steps,
        cpu_s=history.cpu_s,
        tenants=tenants,
    )


def recording_figures(done: Replayed) -> dict[str, Any]:
    """Return the figures of a replayed recording; times are of the recorded clock."""
    return {
        "requests": done.num_requests,
        "steps": done.num_committed,
        "preemptions": done.stats.preemptions,
        "ttft_s": Spread.of(done.ttfts_s),
        "itl_s": _weighted([done.gaps.times]),
    }


def _of_tenant(served: Sequence[Served], targets: Targets) -> TenantFigures:
    return TenantFigures(
        num_served=len(served),
        ttft_s=Spread.of(each.ttft_s for each in served),
        tpot_s=Spread.of(each.tpot_s for each in served if each.num_tokens > 1),
        e2e_s=Spread.of(each.e2e_s for each in served),
        goodput_ratio=sum(map(targets.met_by, served)) / len(served),
    )


def _weighted(counts: Sequence[dict[float, int]]) -> Spread:
    """Return the spread of counted values."""
    pairs = sorted((value, times) for each in counts for value, times in each.items())
    if not pairs:
        return _NEVER
    totals = list(accumulate(times for _, times in pairs))
    num = totals[-1]

    def quantile(share: float) -> float:
        return next(value for (value, _), total in zip(pairs, totals, strict=True) if total >= share * num)

    mean = sum(value * times for value, times in pairs) / num
    p50, p90, p99 = map(quantile, QUANTILES)
    return Spread(mean, p50, p90, p99, num)
