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
from engine.core.stats import Stats
from engine.core.types import Request
from engine.overload import INPUTS_AS_ONE, MAX_RETRY_S, UNKNOWN_S, OverloadControl, QueueLimits
from loadtest.simulation.replay import to_request
from loadtest.simulation.replica import Replica
from loadtest.simulation.trace import TraceRequest
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
            replica.turn()
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


def full(limits: QueueLimits, answer_s: float, num_waiting_tokens: int = 3) -> OverloadControl:
    """Four slots, all taken, and one request that waits; answers took so many seconds."""
    sizes = SchedulerConfig(num_blocks=64, block_size=4, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=12)
    stats = Stats(num_running=4, num_waiting=1, num_waiting_tokens=num_waiting_tokens, answer_s=answer_s)
    return OverloadControl(sizes, stats, limits)


def told(door: OverloadControl, num_tokens: int = 3, now: float = 0.0) -> float:
    with pytest.raises(OverloadedError) as refused:
        door.check(now, num_tokens)
    return refused.value.retry_after_s


def test_places_become_free_at_the_pace_of_recent_answers() -> None:
    assert told(full(QueueLimits(max_requests=1), 8.0)) == pytest.approx(2.0)
    assert told(full(QueueLimits(max_requests=1), 0.0)) == UNKNOWN_S, "no answer was completed yet"


def test_each_refused_client_is_told_of_another_place_until_its_time_has_come() -> None:
    door = full(QueueLimits(max_requests=1), 8.0)
    assert [told(door) for _ in range(3)] == pytest.approx([2, 4, 6])
    assert told(door, now=4.5) == pytest.approx(4), "one is still to come back"
    assert told(door, now=99.0) == pytest.approx(2), "and now none is"


def test_a_place_for_many_tokens_takes_more_departures() -> None:
    assert told(full(QueueLimits(max_tokens=6), 8.0), 4) == pytest.approx(2.0)
    assert told(full(QueueLimits(max_tokens=3), 8.0), 60) == pytest.approx(4.0)


def test_a_place_behind_several_takes_as_many_departures() -> None:
    assert QueueLimits(max_requests=2).count_departures(num_ahead=5, num_inputs=5, num_tokens=0) == 4


def test_further_inputs_count_as_few_requests() -> None:
    door = full(QueueLimits(max_requests=3), 8.0)
    door._stats.num_waiting = door._stats.num_further = 3 * INPUTS_AS_ONE - 1
    door.check(0.0, 3)
    door._stats.num_waiting += 1
    with pytest.raises(OverloadedError, match="3 requests wait already"):
        door.check(0.0, 3)


def test_a_place_behind_requests_of_many_inputs_takes_departures_of_inputs() -> None:
    limits = QueueLimits(max_requests=2)
    assert limits.count_departures(num_ahead=2, num_inputs=100, num_tokens=0) == 50, "one of two requests"
    door = full(QueueLimits(max_tokens=400), 8.0, num_waiting_tokens=400)
    door._stats.num_waiting, door._stats.num_further = 40, 39
    assert told(door, 40) == pytest.approx(4 * 2.0), "40 tokens are those of four inputs"


def test_a_wait_is_never_longer_than_clients_obey() -> None:
    door = full(QueueLimits(max_requests=1), 30.0)
    assert told(door) < MAX_RETRY_S
    assert [told(door) for _ in range(5000)][-1] == MAX_RETRY_S
