"""Replays traces through models of one daemon, whose steps take turns as the engines' do (engine/arbiter.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from engine.arbiter import Arbiter
from engine.core.budget import Beside
from engine.core.config import SchedulerConfig
from loadtest.simulation.costs import StepCosts
from loadtest.simulation.replay import History, timed
from loadtest.simulation.replica import Replica
from loadtest.simulation.trace import TraceRequest, to_request


class Model(NamedTuple):
    """A model and the requests for it, in order of arrival."""

    rows: Sequence[TraceRequest]
    config: SchedulerConfig
    costs: StepCosts


class _Clock:
    now = 0.0


class _Driven:
    """A replica as the arbiter drives it, on the daemon's clock."""

    share, used_s, is_urgent, is_seen = 1.0, 0.0, True, True

    def __init__(self, replica: Replica, target_itl_s: float | None, clock: _Clock) -> None:
        self.replica, self.target_itl_s, self._clock = replica, target_itl_s, clock

    @property
    def is_ready(self) -> bool:
        return self.replica.has_work

    @property
    def stream_s(self) -> float:
        return self.replica.decode_s

    def turn(self, beside: Beside | None) -> bool:
        self.replica.plan_beside(beside)
        self.replica.now = max(self._clock.now, self.replica.now)
        self.replica.turn()
        self._clock.now = self.replica.now
        return True

    def chores(self) -> Iterator[None]:
        return iter(())


def replay_together(models: Sequence[Model]) -> list[History]:
    """Simulate until everything is answered; one history for each model."""
    histories, clock = [History() for _ in models], _Clock()
    for history, model in zip(histories, models, strict=True):
        history.replicas.append(Replica(model.config, model.costs, on_finish=history.finish))
    arbiter = Arbiter(lambda: clock.now)
    driven = [
        _Driven(history.replicas[0], model.config.target_itl_s, clock)
        for history, model in zip(histories, models, strict=True)
    ]
    arrivals = sorted(
        (row.arrival_s, place, index) for place, model in enumerate(models) for index, row in enumerate(model.rows)
    )[::-1]
    with timed(histories[0]):
        while arrivals or any(each.is_ready for each in driven):
            ready = [each for each in driven if each.is_ready]
            if arrivals and (not ready or arrivals[-1][0] <= clock.now):
                at_s, place, index = arrivals.pop()
                clock.now = max(clock.now, at_s)
                row = models[place].rows[index]
                histories[place].submit(row, to_request(row, index), 0, at_s)
            else:
                arbiter.give_turn([*ready])
    for history in histories:
        history.replicas[0].check_integrity()
    return histories
