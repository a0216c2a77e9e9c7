"""Retry-After against the simulator: refused clients are told when there is a place for each of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from statistics import median

import pytest

from engine.core.config import SchedulerConfig
from engine.core.errors import OverloadedError
from engine.core.fake_runner import FakeRunner
from engine.core.overload import MAX_RETRY_S, OverloadControl, QueueLimits
from engine.core.scheduler import Scheduler
from engine.core.types import Request
from loadtest.simulation.replay import to_request
from loadtest.simulation.replica import Replica
from loadtest.simulation.trace import TraceRequest
from tests.pure.driver import request
from tests.pure.test_simulation_replay import COSTS, config

SLOTS, PLACES, PROMPT = 8, 16, 48


@dataclass
class Refused:
    at_s: float
    told_s: float
    rank: int  # among the refused clients that have not come back
    num_started: int  # requests that had left the queue by then


@dataclass
class Crowd:
    """Clients of one simulated daemon; those that are refused come back when they were told to."""

    lengths: Callable[[random.Random], tuple[int, int]]  # max_tokens, and how many are drawn
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    refused: list[Refused] = field(default_factory=list)
    coming_back: list[tuple[float, Request]] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)  # when requests left the queue

    def __post_init__(self) -> None:
        self.replica = Replica(config(max_num_seqs=SLOTS), COSTS, limits=QueueLimits(max_requests=PLACES))
        self.num_asked = 0

    def new(self) -> Request:
        self.num_asked += 1
        most, drawn = self.lengths(self.rng)
        return to_request(TraceRequest(0.0, PROMPT, drawn, most), self.num_asked)

    def advance(self, until_s: float) -> None:
        replica = self.replica
        while replica.now < until_s and replica.num_requests:
            replica._turn()
            while len(self.starts) < replica.stats.queue_s.count:
                self.starts.append(replica.now)
        if until_s < inf:
            replica.now = max(replica.now, until_s)

    def ask(self, asked: Request, at_s: float) -> None:
        try:
            self.replica.submit(asked, at_s)
        except OverloadedError as error:
            self.refused.append(Refused(at_s, error.retry_after_s, len(self.coming_back) + 1, len(self.starts)))
            self.coming_back.append((at_s + error.retry_after_s, asked))

    def run(self, arrivals: list[float]) -> None:
        queue = sorted(arrivals)
        while queue or self.coming_back:
            self.coming_back.sort(key=lambda each: each[0])
            if self.coming_back and (not queue or self.coming_back[0][0] <= queue[0]):
                at_s, asked = self.coming_back.pop(0)
            else:
                at_s, asked = queue.pop(0), self.new()
            self.advance(at_s)
            self.ask(asked, self.replica.now)
        self.advance(inf)

    def errors(self) -> list[float]:
        """How far off each refused client's time was: its place came when so many more had left the queue."""
        found = []
        for each in self.refused:
            real_s = self.starts[each.num_started + each.rank - 1] - each.at_s
            found.append(abs(each.told_s - real_s) / max(real_s, 0.1))
        return found


def fixed(rng: random.Random) -> tuple[int, int]:
    return 100, 100


def mixed(rng: random.Random) -> tuple[int, int]:
    return 400, min(1 + int(rng.expovariate(1 / 80)), 400)


def cut_or_short(rng: random.Random) -> tuple[int, int]:
    return (200, 200) if rng.random() < 0.5 else (200, 20)


def overloaded(lengths: Callable[[random.Random], tuple[int, int]], seed: int) -> Crowd:
    """All slots and places are taken, and some requests have been answered."""
    crowd = Crowd(lengths, random.Random(seed))
    crowd.run([0.02 * i for i in range(SLOTS + PLACES)])
    now = crowd.replica.now
    for i in range(SLOTS + PLACES):
        crowd.ask(crowd.new(), now + 0.02 * i)
        crowd.advance(now + 0.02 * i)
    return crowd


@pytest.mark.parametrize("lengths", [fixed, mixed, cut_or_short])
def test_a_burst_is_told_when_each_of_it_has_a_place(lengths: Callable[[random.Random], tuple[int, int]]) -> None:
    errors: list[float] = []
    for seed in range(5):
        crowd = overloaded(lengths, seed)
        num_before, now = len(crowd.refused), crowd.replica.now
        crowd.run([now + i * 0.01 for i in range(80)])
        burst = crowd.refused[num_before:]
        assert len(burst) >= 50
        assert len({round(each.told_s, 3) for each in burst[:40]}) > 20, "they do not all come back together"
        assert burst[39].told_s > 2 * burst[0].told_s
        errors += crowd.errors()
    assert median(errors) <= 0.3


@pytest.mark.parametrize("lengths", [fixed, mixed, cut_or_short])
def test_under_lasting_overload_they_are_told_so_too(lengths: Callable[[random.Random], tuple[int, int]]) -> None:
    """Requests come at twice the pace at which they are answered, for a while."""
    errors: list[float] = []
    for seed in range(5):
        crowd = overloaded(lengths, seed)
        now = crowd.replica.now
        pace = len(crowd.starts) / now
        crowd.run([now + i / (2 * pace) for i in range(150)])
        assert len(crowd.refused) >= 50
        errors += crowd.errors()
    assert median(errors) <= 0.3


# -- what it reckons with ----------------------------------------------------------------------------------------------


def door_after(lengths: list[int], *, max_tokens: int = 40) -> tuple[Scheduler, OverloadControl]:
    """One slot, taken by an answer that has just begun, one place, and answers of these lengths before; steps take 1 s."""
    settings = SchedulerConfig(num_blocks=64, block_size=4, max_model_len=64, max_num_seqs=1, max_num_batched_tokens=12)
    scheduler = Scheduler(settings)
    runner = FakeRunner(settings)

    def step() -> None:
        plan = scheduler.plan(0.0)
        assert plan is not None
        scheduler.commit(plan, runner.run(plan).wait(), 0.0)
        door.stepped(1.0)

    door = OverloadControl(scheduler, QueueLimits(max_requests=1))
    for index, length in enumerate(lengths):
        scheduler.add(request(f"past {index}", max_tokens=40, eos_token_ids=frozenset()))
        while scheduler.has_work:
            step()
        scheduler._recorder.answers[-1] = length  # as if it had ended by itself
    scheduler.add(request("runs", max_tokens=max_tokens, eos_token_ids=frozenset()))
    step()
    scheduler.add(request("waits", max_tokens=max_tokens, eos_token_ids=frozenset()))
    return scheduler, door


def told(door: OverloadControl, now: float = 0.0) -> float:
    with pytest.raises(OverloadedError) as refused:
        door.check(now, 3)
    return refused.value.retry_after_s


def test_the_time_is_that_of_answers_like_the_recent_ones() -> None:
    assert told(door_after([10] * 9)[1]) == pytest.approx(9)  # a token of it is there
    assert told(door_after([30] * 9)[1]) == pytest.approx(29)
    assert told(door_after([30] * 9, max_tokens=5)[1]) == pytest.approx(4), "but no longer than it may be"
    assert told(door_after([])[1]) == pytest.approx(39), "of which nothing is known"


def test_each_refused_client_is_told_of_another_place_until_its_time_has_come() -> None:
    _, door = door_after([10] * 9)
    times = [told(door) for _ in range(3)]
    assert times == pytest.approx([9, 9 + 11, 9 + 22])  # a prompt's step and ten more
    assert told(door, now=9.5) == pytest.approx(31), "two are still to come back"
    assert told(door, now=99.0) == pytest.approx(9), "and now nobody is"


def test_a_place_for_many_tokens_takes_more_departures() -> None:
    scheduler, _ = door_after([10] * 9)
    by_tokens = OverloadControl(scheduler, QueueLimits(max_tokens=6))
    by_tokens.stepped(1.0)
    with pytest.raises(OverloadedError) as refused:
        by_tokens.check(0.0, 4)  # 3 wait
    assert refused.value.retry_after_s == pytest.approx(9)
    fewer = OverloadControl(scheduler, QueueLimits(max_tokens=3))
    with pytest.raises(OverloadedError) as refused:
        fewer.check(0.0, 60)
    assert 0 < refused.value.retry_after_s < 9, "no step has ended yet, and is not taken to last a second"
    fewer.stepped(1.0)
    with pytest.raises(OverloadedError) as refused:
        fewer.check(10.0, 60)
    assert refused.value.retry_after_s > 9


def test_a_wait_is_never_longer_than_clients_obey() -> None:
    _, door = door_after([30] * 9)
    assert told(door) < MAX_RETRY_S
    assert [told(door) for _ in range(5000)][-1] == MAX_RETRY_S
