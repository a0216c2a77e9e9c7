"""Times short work on the device, on CUDA inside a graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

_REPLAYS = 7
_LEAST_CALLS = 20  # in a graph, so that its launch is negligible
L2_BYTES = 256 << 20  # inputs take turns until they exceed the cache together


def median_s(calls: Sequence[Callable[[], object]]) -> float:
    """Return the median over rounds of the mean seconds of a call.

    The calls do the same work on different data. They may allocate, and must not wait for the device. Each runs once
    before, which compiles the kernels.
    """
    for call in calls:
        call()
    return _median_on_device(calls) if torch.cuda.is_available() else _median_here(calls)


def num_copies(num_bytes: int) -> int:
    """Return the number of inputs of this size that together exceed the caches."""
    return max(1, min(64, -(-L2_BYTES // max(num_bytes, 1)))) if torch.cuda.is_available() else 1


def _median_on_device(calls: Sequence[Callable[[], object]]) -> float:
    torch.cuda.synchronize()
    rounds = max(1, -(-_LEAST_CALLS // len(calls)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    took: list[float] = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end) / 1e3 / (rounds * len(calls)))
    return statistics.median(took)


def _median_here(calls: Sequence[Callable[[], object]]) -> float:
    took = []
    for call in calls:
        begun = time.perf_counter()
        call()
        took.append(time.perf_counter() - begun)
    return statistics.median(took)
