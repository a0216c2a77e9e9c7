"""Reads the times of steps and answers from a recording of `quire serve --record`.

They are the daemon's clock readings, with the plans of the same steps, and contain what the daemon and its clients take
from each other on one machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.config import SchedulerConfig
from loadtest.errors import LoadtestError
from loadtest.simulation.measure import Shape
from loadtest.simulation.recording import Replayer


class Measured(NamedTuple):
    """What a recorded run says about a daemon: its scheduler, and its steps."""

    config: SchedulerConfig
    shapes: list[Shape]
    seconds: list[float]
    ttft_s: list[float]


class _Timer(Replayer):
    """Replays a recording and times its turns, from one commit to the next where work was left."""

    def __init__(self, header: dict[str, Any]) -> None:
        super().__init__(header)
        self.shapes: list[Shape] = []
        self.seconds: list[float] = []
        self._begun_s = 0.0
        self._is_busy = False

    @property
    def config(self) -> SchedulerConfig:
        return self._scheduler.config

    def plan(self, line: dict[str, Any]) -> None:
        super().plan(line)
        if not self._is_busy:
            self._begun_s, self._is_busy = line["at"], True
        if self._launched:
            spans = self._launched[-1].spans
            contexts = tuple(start + 1 for start, count in spans if count == 1)
            chunks = tuple((start, count) for start, count in spans if count > 1)
            self.shapes.append(Shape(contexts, chunks))

    def commit(self, line: dict[str, Any]) -> None:
        super().commit(line)
        self.seconds.append(line["at"] - self._begun_s)
        self._begun_s, self._is_busy = line["at"], self._scheduler.has_work


def read_recording(path: Path) -> Measured:
    """Return the steps of a recording. Raises LoadtestError."""
    with path.open(encoding="utf-8") as lines:
        timer = _Timer(json.loads(next(lines)))
        for text in lines:
            if not text.endswith("\n"):
                break
            timer.take(json.loads(text))
            if timer.done.difference:
                raise LoadtestError(f"{path} cannot be replayed: {timer.done.difference}")
    return Measured(timer.config, timer.shapes[: len(timer.seconds)], timer.seconds, timer.done.ttfts_s)
