"""Times moving blocks, on the real engine's runner: to host memory and back, and in parcels from one daemon to another.

Both ends of a parcel are this process, one after the other, which is what two daemons that share a machine's memory take;
a network's part is not in it. Overwrites blocks of the pool.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from engine.connector.base import Layout
from engine.connector.local import LocalConnector
from engine.core.config import SchedulerConfig
from engine.core.plan import Runner, StepPlan
from loadtest.simulation.costs import Copies, Handoff

_FEW, _MANY, _ROUNDS = 4, 128, 7
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of our own in it


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


def measure_handoff(runner: Runner, layout: Layout, num_blocks: int) -> Handoff:
    """Reading, sealing, opening, checking and writing, and of these the parts for which either engine rests."""
    many = min(_MANY, num_blocks)
    with tempfile.TemporaryDirectory(dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None) as folder:
        connector = LocalConnector(Path(folder) / "parcels", 1 << 40)

        def hand_over(count: int) -> None:
            blocks = list(range(count))
            parcel = connector.pack(layout, count)
            runner.read_blocks(blocks, parcel.rows)
            runner.write_blocks(blocks, connector.open(parcel.send(count), layout))

        trip_s, block_s = _line(lambda count: _seconds(lambda: hand_over(count)), _FEW, many)
        parcel = connector.pack(layout, many)
        blocks = list(range(many))
        read_s = _seconds(lambda: runner.read_blocks(blocks, parcel.rows))
        write_s = _seconds(lambda: runner.write_blocks(blocks, parcel.rows))
        parcel.drop()
    return Handoff(trip_s, block_s, (read_s + write_s) / 2 / many, layout.block_bytes)


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
