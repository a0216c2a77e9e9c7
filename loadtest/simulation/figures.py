"""From a history to figures: latencies, goodput, fairness, memory, for all requests and tenant by tenant. Pure arithmetic."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from engine.core.stats import PreemptionKind
from loadtest.report import QUANTILES, Spread
from loadtest.simulation.recording import Replayed
from loadtest.simulation.replay import History, Served

_WINDOW_S = 5.0  # over which service is compared for the fairness index
_NEVER = Spread(math.nan, math.nan, math.nan, math.nan, 0)


class Targets(NamedTuple):
    """The highest latencies of a good answer, in seconds."""

    ttft_s: float
    tpot_s: float

    def met_by(self, served: Served) -> bool:
        return served.ttft_s <= self.ttft_s and (served.num_tokens == 1 or served.tpot_s <= self.tpot_s)


@dataclass(frozen=True, slots=True)
class Figures:
    """A replay in numbers. Times are seconds, rates are a second of simulated time."""

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
    fairness: float  # see fairness_index; nan where no two tenants ever competed
    preemptions: int
    swapped: int  # of these, those that were copied to host memory
    prefix_hit_ratio: float
    busy_ratio: float
    mean_blocks_held: float
    most_blocks_held: int
    most_waiting: int
    sequence_steps: int
    cpu_s: float
    tenants: dict[str, TenantFigures]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """The figures of one tenant's requests."""

    num_served: int
    ttft_s: Spread
    tpot_s: Spread
    e2e_s: Spread
    goodput_ratio: float


def summarize(history: History, targets: Targets) -> Figures:
    """All figures of a replay."""
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
        fairness=fairness_index(by_tenant),
        preemptions=sum(each.preemptions for each in stats),
        swapped=sum(each.preempted[PreemptionKind.SWAP] for each in stats),
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
    """All figures of a replayed recording; times are seconds on the recorded clock."""
    return {
        "requests": done.num_requests,
        "steps": done.num_committed,
        "preemptions": done.stats.preemptions,
        "ttft_s": asdict(Spread.of(done.ttfts_s)),
        "itl_s": asdict(_weighted([done.gaps.times])),
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
    """A spread of values that were counted."""
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


def jain(values: Sequence[float]) -> float:
    """Jain's index: 1 where all are equal, 1 / n where one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def fairness_index(by_tenant: dict[str, list[Served]]) -> float:
    """Jain's index of the tokens computed for tenants that compete: the mean over windows of some seconds.

    In a window those compete who had a request waiting all through it: they could have used more than they got. A
    tenant that was given all it asked for is not in it, however little that was. nan if no two ever compete.
    """
    num_windows = 1 + int(
        max((each.row.arrival_s + each.e2e_s for served in by_tenant.values() for each in served), default=0.0)
        / _WINDOW_S
    )
    backlogs = {name: _covered(served, num_windows) for name, served in by_tenant.items()}
    services = {name: _service(served, num_windows) for name, served in by_tenant.items()}
    found = []
    for window in range(num_windows):
        rivals = [name for name, covered in backlogs.items() if covered[window] > 0.99 * _WINDOW_S]
        if len(rivals) > 1:
            found.append(jain([services[name][window] for name in rivals]))
    return sum(found) / len(found) if found else math.nan


def _covered(served: Iterable[Served], num_windows: int) -> list[float]:
    """Seconds of each window in which at least one request waited."""
    waits = sorted((each.row.arrival_s, each.row.arrival_s + each.queue_s) for each in served)
    merged: list[tuple[float, float]] = []
    for start, stop in waits:
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return _spread_over([(start, stop, stop - start) for start, stop in merged], num_windows)


def _service(served: Iterable[Served], num_windows: int) -> list[float]:
    """Tokens of each window: a prompt's while it was computed, an answer's while it came, evenly."""
    parts = []
    for each in served:
        started = each.row.arrival_s + each.queue_s
        first_token = each.row.arrival_s + each.ttft_s
        parts.append((started, first_token, float(each.row.prompt_tokens)))
        parts.append((first_token, first_token + each.decode_s, float(each.num_tokens)))
    return _spread_over(parts, num_windows)


def _spread_over(parts: Iterable[tuple[float, float, float]], num_windows: int) -> list[float]:
    """Return the share in each window of amounts that are spread evenly from a start to a stop."""
    found = [0.0] * num_windows
    for start, stop, amount in parts:
        first, last = int(start / _WINDOW_S), min(int(stop / _WINDOW_S), num_windows - 1)
        for window in range(first, last + 1):
            overlap = min(stop, (window + 1) * _WINDOW_S) - max(start, window * _WINDOW_S)
            found[window] += amount * (overlap / (stop - start) if stop > start else 1.0)
    return found
