"""Times copies of blocks to host memory and back, on the real engine's runner. Overwrites blocks of the pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from engine.core.config import SchedulerConfig
from engine.core.step import Runner, StepPlan
from loadtest.simulation.costs import Copies

_MANY, _ROUNDS = 128, 7


def measure_copies(runner: Runner, config: SchedulerConfig) -> Copies:
    """Out and back again; nothing where no blocks of host memory are set aside."""
    many = min(_MANY, config.num_host_blocks, config.num_blocks)
    if many < 2:
        return Copies()

    def copy(count: int) -> None:
        pairs = [(block, block) for block in range(count)]
        runner.run(StepPlan(0, [], [], 0, 0, swap_out=pairs, swap_in=pairs)).wait()

    trip_s, block_s = _line(lambda count: _seconds(lambda: copy(count)), 1, many)
    return Copies(trip_s, block_s)


def _seconds(task: Callable[[], None]) -> float:
    """The median of some rounds; the first finds new memory and does not count."""
    found = []
    for _ in range(_ROUNDS + 1):
        begun = time.perf_counter()
        task()
        found.append(time.perf_counter() - begun)
    return median(found[1:])


def _line(seconds: Callable[[int], float], few: int, many: int) -> tuple[float, float]:
    """What any number of blocks takes, and each of them."""
    few_s, many_s = seconds(few), seconds(many)
    each_s = max(many_s - few_s, 0.0) / (many - few) if many > few else few_s / few
    return max(few_s - few * each_s, 0.0), each_s
