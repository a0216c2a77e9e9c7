"""Seconds of short device work. On a CUDA device calls are timed inside a graph, so that Python's launches cost nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

_REPLAYS = 7
_LEAST_CALLS = 20  # a graph has; its own launch is then lost among them
L2_BYTES = 256 << 20  # inputs that are to come from memory take turns until they are together this large


def median_s(calls: Sequence[Callable[[], object]]) -> float:
    """Median over some rounds of the mean seconds of a call. The calls do the same to different data, in turn.

    They may allocate; they must not wait for the device. Each is run once before, which compiles what must be compiled.
    """
    for call in calls:
        call()
    return _median_on_device(calls) if torch.cuda.is_available() else _median_here(calls)


def num_copies(num_bytes: int) -> int:
    """How many sets of inputs of this size outgrow the caches."""
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
