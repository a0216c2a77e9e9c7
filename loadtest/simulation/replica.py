"""A simulated daemon: the real scheduler on a virtual clock.

StepCosts give the time of a step. A drawn token is its own position, so that answers end where they did in the trace,
unless the caller draws.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from engine.core.budget import Beside
from engine.core.config import SchedulerConfig
from engine.core.scheduling.scheduler import Scheduler
from engine.core.stats import Histogram, Stats
from engine.core.step import RowStart, StepPlan, StepResult
from engine.core.types import Request, TokenEvent
from engine.overload import NO_LIMITS, OverloadControl, QueueLimits
from loadtest.errors import LoadtestError
from loadtest.simulation.costs import StepCosts


class Sample(NamedTuple):
    """A replica at one moment."""

    time_s: float
    blocks_held: int
    num_waiting: int
    num_preempted: int


class Gaps(Histogram):
    """All times between two tokens of an answer; the daemon counts them in buckets."""

    __slots__ = ("times",)

    def __init__(self) -> None:
        super().__init__(())
        self.times: dict[float, int] = {}

    def observe(self, value: float, times: int = 1) -> None:
        rounded = round(value, 5)
        self.times[rounded] = self.times.get(rounded, 0) + times


Finished = Callable[[TokenEvent], None]
Draw = Callable[[RowStart, int], int]  # the token that follows a position of a row


class Replica:
    """Takes requests in order of arrival; the caller advances its clock between them."""

    def __init__(
        self,
        config: SchedulerConfig,
        costs: StepCosts,
        *,
        depth: int = 0,
        sample_every_s: float = 0.0,
        on_finish: Finished = lambda _: None,
        on_prompt: Finished = lambda _: None,
        limits: QueueLimits = NO_LIMITS,
        draw: Draw | None = None,
    ) -> None:
        self.gaps = Gaps()
        self.stats = Stats(itl_s=self.gaps)
        self.samples: list[Sample] = []
        self.num_sequence_steps = 0
        self.busy_s = 0.0
        self.decode_s = 0.0  # of the last step with decodes alone, as the engine has it
        self.now = 0.0
        self._scheduler = Scheduler(config, self.stats)
        self._costs, self._depth, self._on_finish = costs, depth, on_finish
        self._draw, self._rows = draw, dict[int, RowStart]()  # by slot
        self._on_prompt = on_prompt
        self._overload = OverloadControl(config, self.stats, limits)
        self._launched: deque[tuple[StepPlan, StepResult, float]] = deque()
        self._device_free_s = 0.0
        self._owed_s = 0.0  # by the next step, for requests that were taken in
        self._num_ended = 0
        self._sample_every_s, self._next_sample_s = sample_every_s, 0.0

    @property
    def num_requests(self) -> int:
        """Return the number of open requests."""
        stats = self.stats
        return stats.num_running + stats.num_waiting + stats.num_preempted

    @property
    def has_work(self) -> bool:
        """Return whether a turn would do anything."""
        return self._scheduler.has_work

    def plan_beside(self, beside: Beside | None) -> None:
        """Plan steps beside other models' from now on."""
        self._scheduler.plan_beside(beside)

    def submit(self, request: Request, at_s: float) -> None:
        """Take a request. Raises ClientError or OverloadedError."""
        self._overload.check(at_s, len(request.prompt))
        if not self._scheduler.has_work:
            self.now = max(self.now, at_s)
        self._scheduler.add(request)
        self._owed_s += self._costs.front.intake_s

    def advance(self, until_s: float) -> None:
        """Simulate all turns that begin before a moment."""
        scheduler = self._scheduler
        while self.now < until_s and scheduler.has_work:
            self.turn()

    def check_integrity(self) -> None:
        """Raise AssertionError if anything leaked."""
        assert not self._scheduler.has_work, "a request was forgotten"
        assert not self._scheduler.kv.num_leaked, "a block or row is held by nothing"

    def turn(self) -> None:
        """Drop requests that will miss their deadline, launch a step, commit the oldest."""
        for event in self._scheduler.drop_hopeless(self.now):
            self._num_ended += 1
            self._on_finish(event)
        plan = self._scheduler.plan(self.now)
        if plan is not None:
            self._launch(plan)
        elif not self._launched and self._scheduler.has_work and not self._scheduler.has_parked:
            raise LoadtestError("requests wait, nothing runs, and the scheduler plans nothing.")
        if self._launched and (plan is None or len(self._launched) > self._depth):
            self._commit()
        # Stores are as fast as memory here.
        self._scheduler.transferred([(transfer, True) for transfer in self._scheduler.tiers.start(self.now)])

    def _launch(self, plan: StepPlan) -> None:
        num_seqs = plan.num_slices
        self.num_sequence_steps += num_seqs
        ending = [each for each in plan.chunks if each.samples]
        drawn = [*plan.positions, *(each.start + each.num_tokens - 1 for each in ending)]
        if plan.num_tokens == num_seqs == plan.num_samples:
            seconds = self._costs.decode_step(num_seqs, sum(drawn) + num_seqs)
        else:
            seconds = self._costs.step(plan)
        if self._draw is not None:
            self._rows |= {row.slot: row for row in plan.rows}
            slots = [*plan.slots, *(each.slot for each in ending)]
            drawn = [self._draw(self._rows[slot], position) for slot, position in zip(slots, drawn, strict=True)]
        seconds += self._owed_s
        self._owed_s = 0.0
        self.busy_s += seconds
        self._device_free_s = max(self.now, self._device_free_s) + seconds
        self._launched.append((plan, StepResult(drawn), self._device_free_s))
        if not (plan.slots and plan.chunks):
            self.decode_s = seconds if plan.slots else 0.0

    def _commit(self) -> None:
        plan, result, done_s = self._launched.popleft()
        self.now = max(self.now, done_s)
        events = self._scheduler.commit(plan, result, self.now)
        for entry in events.entries:
            if isinstance(entry, TokenEvent) and entry.prompt is not None:
                self._on_prompt(entry)
        num_ended = sum(self.stats.finished.values())
        if num_ended != self._num_ended:
            self._num_ended = num_ended
            for event in events:
                if event.finish_reason is not None:
                    self._on_finish(event)
        if self.now >= self._next_sample_s:
            self._next_sample_s = self.now + self._sample_every_s
            self.samples.append(self._sample())

    def _sample(self) -> Sample:
        stats = self.stats
        return Sample(self.now, stats.blocks_held, stats.num_waiting, stats.num_preempted)
