"""Profiles a decode run: the idle time of the GPU, and its kernels.

The GPU is busy while a kernel or a copy runs. Tracing slows graphs down a little, so the seconds of a step are reported
with and without it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tools.gpu.figures import covered

_SETTLING_STEPS = 16
TRACED_STEPS = 48
_NUM_NAMED = 15
_SKIPPED = 10  # the first tenth, which the start of the tracer delays

ACTIVITY = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU


@dataclass(frozen=True, slots=True)
class Trace:
    """The activities of the traced steps, in seconds."""

    span_s: float
    busy_s: float
    num_activities: int
    by_name: dict[str, float]  # the longest, as shares of the busy time

    @property
    def idle_share(self) -> float:
        return 1.0 - self.busy_s / self.span_s


class Tracer:
    """Traces some steps in which all of `batch` decode; called on the engine thread."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._num_full = 0
        self._profile = profile(activities=[ACTIVITY])
        with profile(activities=[ACTIVITY]):
            pass  # the first start of the tracer is slow

    def __call__(self, num_sequences: int) -> None:
        if num_sequences != self._batch:
            return
        self._num_full += 1
        if self._num_full == _SETTLING_STEPS:
            self._profile.start()
        elif self._num_full == _SETTLING_STEPS + TRACED_STEPS:
            self._profile.stop()

    def read(self) -> Trace | None:
        """Return the trace after the steps; None if there were too few, or no activity."""
        return _read(self._profile) if self._num_full >= _SETTLING_STEPS + TRACED_STEPS else None


def _read(profiler: profile) -> Trace | None:
    wanted = DeviceType.CUDA if torch.cuda.is_available() else DeviceType.CPU
    spans = sorted(
        (event.time_range.start / 1e6, event.time_range.end / 1e6, event.name)
        for event in profiler.events() or ()  # type: ignore[no-untyped-call]
        if event.device_type == wanted and not event.is_user_annotation
    )
    spans = spans[len(spans) // _SKIPPED :]
    if not spans:
        return None
    by_name: Counter[str] = Counter()  # of seconds
    for begin, end, name in spans:
        by_name[name[:100]] += end - begin
    total = sum(by_name.values())
    return Trace(
        span_s=max(end for _, end, _ in spans) - spans[0][0],
        busy_s=covered((begin, end) for begin, end, _ in spans),
        num_activities=len(spans),
        by_name={name: round(spent / total, 4) for name, spent in by_name.most_common(_NUM_NAMED)},
    )
