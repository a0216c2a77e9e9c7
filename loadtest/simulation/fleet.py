"""Finds the highest request rate at which a fleet still meets its targets.

A rate is tried by replaying the workload at that speed; the search doubles until the targets are missed, then bisects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.core.config import SchedulerConfig
from loadtest.simulation.costs import StepCosts
from loadtest.simulation.figures import Targets
from loadtest.simulation.replay import replay
from loadtest.simulation.replica import Replica
from loadtest.simulation.routers import Router
from loadtest.simulation.trace import TraceRequest, at_speed

_PRECISION = 0.02
_MIN_SPEED, _MAX_SPEED = 1e-3, 1e4


def natural_rate(rows: Sequence[TraceRequest]) -> float:
    """Return the requests a second of a trace."""
    return (len(rows) - 1) / rows[-1].arrival_s


def highest_speed(is_good: Callable[[float], bool]) -> float:
    """Return the highest good speed, to _PRECISION; 0 if there is none."""
    low, high = 0.0, 1.0
    while high < _MAX_SPEED and is_good(high):
        low, high = high, 2 * high
    if not low:
        low = high / 2
        while low > _MIN_SPEED and not is_good(low):
            low, high = low / 2, low
        if low <= _MIN_SPEED:
            return 0.0
    while high / low > 1 + _PRECISION:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_good(middle) else (low, middle)
    return low


def capacity(
    rows: Sequence[TraceRequest],
    config: SchedulerConfig,
    costs: StepCosts,
    *,
    num_replicas: int,
    router: Router,
    targets: Targets,
    share: float,
    depth: int = 0,
    new_replica: Callable[..., Replica] = Replica,
) -> float:
    """Return the highest request rate at which `share` of them meet the targets."""

    def is_good(speed: float) -> bool:
        faster = at_speed(rows, speed)
        history = replay(
            faster, config, costs, depth=depth, num_replicas=num_replicas, router=router, new_replica=new_replica
        )
        return sum(map(targets.met_by, history.served)) >= share * len(rows)

    return natural_rate(rows) * highest_speed(is_good)
