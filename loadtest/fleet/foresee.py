"""What the simulator foresees of a fleet's runs.

Step times come from recordings of a run that is not foreseen: the daemons' clock readings, with the plans of the same
steps. They contain what the daemons, the router and the clients take from each other on one machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from engine.core.config import SchedulerConfig
from loadtest.errors import LoadtestError
from loadtest.simulation.closed_loop import Delays, Known
from loadtest.simulation.fleet_figures import Figures
from loadtest.simulation.measure import Shape
from loadtest.simulation.recording import Replayer
from loadtest.simulation.variants import plain_settings

_EVENTS_S = 0.005  # from a step's end until the router has its events


class Measured(NamedTuple):
    """What a recorded run says about a daemon: its scheduler, and its steps."""

    config: SchedulerConfig
    shapes: list[Shape]
    seconds: list[float]
    ttft_s: list[float]
    decode_s: list[float]


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
    num = len(timer.seconds)
    return Measured(timer.config, timer.shapes[:num], timer.seconds, timer.done.ttfts_s, timer.done.decodes_s)


def what_is_known(recorded: Mapping[str, tuple[Sequence[Path], Figures]]) -> dict[str, Known]:
    """Return what one recorded run of each policy tells: common step times, and the policy's delays.

    Some routers ask a daemon for a prompt's tokens before they choose, so the delay differs by policy.
    """
    from loadtest.simulation.fit import fit  # here, because it imports numpy

    read = {policy: [read_recording(path) for path in paths] for policy, (paths, _) in recorded.items()}
    daemons = [daemon for each in read.values() for daemon in each]
    shapes = [shape for daemon in daemons for shape in daemon.shapes]
    costs = fit(shapes, [seconds for daemon in daemons for seconds in daemon.seconds])
    costs = replace(costs, settings=plain_settings(daemons[0].config))
    known = {}
    for policy, (_, seen) in recorded.items():
        # The last requests are the load; those before made sure that the daemons are ready.
        pairs = [each for each in zip(read[policy], seen.shares, strict=True) if each[1]]
        ttft_s = fmean(each for daemon, count in pairs for each in daemon.ttft_s[-count:])
        decode_s = fmean(each for daemon, count in pairs for each in daemon.decode_s[-count:])
        delays = Delays(
            before_s=max(seen.ttft_mean_s - ttft_s, 0.0),
            after_s=max(seen.e2e_mean_s - seen.ttft_mean_s - decode_s, 0.0),
            events_s=_EVENTS_S,
        )
        known[policy] = Known(daemons[0].config, costs, delays)
    return known
