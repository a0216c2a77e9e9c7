"""What the simulator foresees of a fleet's runs.

Step times come from recordings of a run that is not foreseen: the daemons' clock readings, with the plans of the same
steps. They contain what the daemons, the router and the clients take from each other on one machine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from engine.core.config import SchedulerConfig
from engine.core.types import Request, SamplingParams
from loadtest.fleet.runs import Figures
from loadtest.simulation.closed_loop import ClosedLoop, Delays
from loadtest.simulation.costs import StepCosts
from loadtest.simulation.measure import Shape
from loadtest.simulation.policies import POLICIES
from loadtest.simulation.recording import Replayer
from loadtest.simulation.replica import SimulationError

_EVENTS_S = 0.005  # from a step's end until the router has its events


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
            pieces = self._launched[-1].slices
            contexts = tuple(piece.start + 1 for piece in pieces if piece.num_tokens == 1)
            chunks = tuple((piece.start, piece.num_tokens) for piece in pieces if piece.num_tokens > 1)
            self.shapes.append(Shape(contexts, chunks))

    def commit(self, line: dict[str, Any]) -> None:
        super().commit(line)
        self.seconds.append(line["at"] - self._begun_s)
        self._begun_s, self._is_busy = line["at"], self._scheduler.has_work


def read_recording(path: Path) -> Measured:
    """Return the steps of a recording. Raises SimulationError."""
    with path.open(encoding="utf-8") as lines:
        timer = _Timer(json.loads(next(lines)))
        for text in lines:
            if not text.endswith("\n"):
                break
            timer.take(json.loads(text))
            if timer.done.difference:
                raise SimulationError(f"{path} cannot be replayed: {timer.done.difference}")
    num = len(timer.seconds)
    return Measured(timer.config, timer.shapes[:num], timer.seconds, timer.done.ttfts_s)


class Known(NamedTuple):
    """What the simulator is given: a daemon's scheduler, its step times, and the delays outside it."""

    config: SchedulerConfig
    costs: StepCosts
    delays: Delays
    probe_s: float  # TTFT of a cached prompt at rest, in the measured run

    def slower_by(self, probe_s: float) -> Known:
        """Return the same for a router whose own work takes another time at rest."""
        before_s = max(self.delays.before_s + probe_s - self.probe_s, 0.0)
        return self._replace(delays=self.delays._replace(before_s=before_s), probe_s=probe_s)


def measured_costs(paths: Sequence[Path], seen: Figures, probe_s: float) -> Known:
    """Return what the recordings of one run tell."""
    from loadtest.simulation.fit import fit  # here, because it imports numpy

    daemons = [read_recording(path) for path in paths]
    shapes = [shape for daemon in daemons for shape in daemon.shapes]
    seconds = [each for daemon in daemons for each in daemon.seconds]
    inside_s = fmean(each for daemon in daemons for each in daemon.ttft_s)
    delays = Delays(before_s=max(seen.ttft_mean_s - inside_s, 0.0), events_s=_EVENTS_S)
    return Known(daemons[0].config, fit(shapes, seconds), delays, probe_s)


def foresee(
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    known: Known,
    *,
    policy: str,
    num_daemons: int,
    num_clients: int,
    ideal_tokens: int,
) -> Figures:
    """Return the figures of a run on the virtual clock."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    requests = [
        Request(request_id=str(place), prompt=tuple(prompt), params=params, arrival_s=0.0)
        for place, prompt in enumerate(prompts)
    ]
    if policy not in POLICIES:
        raise SimulationError(
            f"the policy {policy!r} is not simulated; leave out --foresee, or name one of {', '.join(POLICIES)}."
        )
    loop = ClosedLoop(known.config, known.costs, num_replicas=num_daemons, policy=POLICIES[policy], delays=known.delays)
    answers = loop.run(requests, num_clients)
    shares = [sum(answer.replica == place for answer in answers) for place in range(num_daemons)]
    return Figures.of_times(
        [answer.ttft_s for answer in answers],
        [answer.e2e_s for answer in answers],
        num_requests=len(answers),
        num_failed=0,
        prompt_tokens=sum(map(len, prompts)),
        ideal_tokens=ideal_tokens,
        cached_tokens=loop.num_cached_tokens,
        duration_s=max(replica.now for replica in loop.replicas),
        shares=tuple(shares),
    )
