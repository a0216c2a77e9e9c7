"""What shortest-job-first is worth by how much it knows: nothing (fcfs), max_tokens, what it learned, all.

The scheduler is the real one; the oracle's lengths are the trace's own. Beside latencies it tells how long anybody waited at
most, by how much predictions were wrong, and how often they had two neighbours the wrong way round, for order is all that
sjf makes of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from engine.core.config import SchedulerConfig
from loadtest.report import Spread
from loadtest.simulation.costs import StepCosts
from loadtest.simulation.predictors import PREDICTORS, Watched
from loadtest.simulation.replay import Served, replay
from loadtest.simulation.replica import Replica
from loadtest.simulation.report import in_percent
from loadtest.simulation.trace import TraceRequest

FCFS, ORACLE = "fcfs", "sjf, oracle"
VARIANTS = (FCFS, *(f"sjf, {name}" for name in PREDICTORS))
_NEIGHBOURS = 50  # requests that come within so many of each other are taken to compete


@dataclass(frozen=True, slots=True)
class Result:
    """One way to order a workload, over all its rounds. Seconds."""

    ttft_s: Spread
    e2e_s: Spread
    most_queued_s: float
    error_tokens: float  # of predictions, in the mean; nan without any
    misordered_ratio: float  # of pairs of neighbours; ties count half


class _Run(NamedTuple):
    rows: Sequence[TraceRequest]
    served: Sequence[Served]
    predicted: Mapping[int, float]  # by row


def compare(
    rounds: Sequence[Sequence[TraceRequest]],
    config: SchedulerConfig,
    costs: StepCosts,
    *,
    depth: int = 0,
    new_replica: Callable[..., Replica] = Replica,
    on_run: Callable[[], None] = lambda: None,
) -> dict[str, Result]:
    """Each variant on the same requests; every round begins with an empty engine that has learned nothing."""
    found = {}
    for variant, make in zip(VARIANTS, (None, *PREDICTORS.values()), strict=True):
        runs = []
        for rows in rounds:
            watched = None if make is None else Watched(make(rows))
            policy = replace(config, policy="fcfs" if watched is None else "sjf")
            history = replay(rows, policy, costs, depth=depth, new_replica=partial(new_replica, predictor=watched))
            runs.append(_Run(rows, history.served, {} if watched is None else watched.predicted))
            on_run()
        found[variant] = _result(runs)
    return found


def _result(runs: Sequence[_Run]) -> Result:
    served = [each for run in runs for each in run.served]
    told = [(value, run.rows[index].output_tokens) for run in runs for index, value in run.predicted.items()]
    return Result(
        ttft_s=Spread.of(each.ttft_s for each in served),
        e2e_s=Spread.of(each.e2e_s for each in served),
        most_queued_s=max((each.queue_s for each in served), default=math.nan),
        error_tokens=Spread.of(abs(value - true) for value, true in told).mean,
        misordered_ratio=Spread.of(each for run in runs for each in misordered(run.rows, run.predicted)).mean,
    )


def misordered(rows: Sequence[TraceRequest], predicted: Mapping[int, float]) -> Iterator[float]:
    """Of each pair of neighbours with answers of different length: 1 if predictions have them the wrong way round, 1/2 if
    they are alike, 0 if they are right."""
    for index, value in predicted.items():
        for other in range(index + 1, index + _NEIGHBOURS):
            if other in predicted and (truth := rows[other].output_tokens - rows[index].output_tokens):
                product = truth * (predicted[other] - value)
                yield 0.5 if not product else float(product < 0)


def gained(results: Mapping[str, Result], variant: str) -> float:
    """Of what the oracle takes off the mean time to an answer's end under fcfs, the part that a variant takes off; nan of
    nothing."""
    before, best = results[FCFS].e2e_s.mean, results[ORACLE].e2e_s.mean
    return (before - results[variant].e2e_s.mean) / (before - best) if before > best else math.nan


def show(found: Mapping[str, Mapping[str, Result]], console: Console) -> None:
    """A table."""
    table = Table(title="Shortest job first, by what it knows; s", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("workload", "variant"):
        table.add_column(column, no_wrap=True)
    for column in (
        "TTFT mean",
        "p50",
        "p99",
        "e2e mean",
        "p50",
        "p99",
        "of the gain",
        "longest wait",
        "error",
        "misordered",
    ):
        table.add_column(column, justify="right")
    for workload, results in found.items():
        for index, (variant, each) in enumerate(results.items()):
            times = [value for spread in (each.ttft_s, each.e2e_s) for value in (spread.mean, spread.p50, spread.p99)]
            is_fcfs = variant == FCFS
            table.add_row(
                "" if index else workload,
                variant,
                *(f"{value:.2f}" for value in times),
                in_percent(gained(results, variant)),
                f"{each.most_queued_s:.1f}",
                "-" if is_fcfs else f"{each.error_tokens:.0f}",
                "-" if is_fcfs else in_percent(each.misordered_ratio),
            )
    console.print(table)
    console.print(
        "of the gain: of what the oracle takes off fcfs's mean e2e. error: tokens, in the mean. misordered: pairs of requests "
        f"less than {_NEIGHBOURS} apart whose predictions have them the wrong way round.",
        style="dim",
    )
