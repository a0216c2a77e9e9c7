"""Times the sum of numbers over two processes: through shared memory, and through gloo's sockets.

    python -m tools.sums

All processes are started here, with one thread each. A figure is the median of many sums, in microseconds, the two kinds in
turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

import torch

from engine.runtime.native.library import native
from engine.runtime.parallel.cpu_groups import GlooGroup, SharedMemoryGroup
from engine.runtime.parallel.group import Group
from loadtest.arguments import positive_int
from loadtest.output import print_table

_WIDTHS, _ROWS = (576, 1024, 2048, 4096), (1, 8, 32, 256)
_NUM_SUMS = 300
_TIMEOUT_S = 60.0


def median_us(group: Group, num: int) -> float:
    """Return the median time of a sum of so many numbers."""
    x, times = torch.zeros(num), []
    for _ in range(_NUM_SUMS):
        begun = time.perf_counter()
        group.all_reduce(x)
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e6


def measure(rank: int, size: int, folder: Path) -> None:
    """Take part as one rank; rank 0 prints the table."""
    torch.set_num_threads(1)
    library = native()
    if library is None:
        raise SystemExit("There are no native kernels here; install a C compiler.")
    library.use_threads(1)
    groups: list[Group] = [
        SharedMemoryGroup(library, folder, rank, size, timeout_s=_TIMEOUT_S),
        GlooGroup(folder, rank, size, timeout_s=_TIMEOUT_S),
    ]
    rows = []
    for width in _WIDTHS:
        for num_rows in _ROWS:
            times = [median_us(group, width * num_rows) for group in groups]
            rows.append([str(width), str(num_rows), *(f"{us:.1f}" for us in times)])
    if rank == 0:
        print_table(["width", "rows", "shared memory, us", "gloo, us"], rows)


def main() -> None:
    """Start the ranks, and wait for them."""
    parser = argparse.ArgumentParser(prog="python -m tools.sums", description=__doc__)
    parser.add_argument("--ranks", type=positive_int, default=2, metavar="N", help="processes (default 2)")
    size, context = parser.parse_args().ranks, get_context("spawn")
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - memory, in a private folder
    with tempfile.TemporaryDirectory(dir=place) as folder:
        ranks = [context.Process(target=measure, args=(rank, size, Path(folder))) for rank in range(size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()


if __name__ == "__main__":
    main()
