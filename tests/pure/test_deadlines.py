"""Requests that set themselves a time: dropped as soon as they cannot keep it, never sooner, and never once started."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.stats import Target
from engine.core.types import FinishReason
from tests.integrity import check_scheduler
from tests.pure.driver import Driver, config, request
from tests.pure.world import CONTEXT_S, FIXED_S, TOKEN_S, World

LIMIT = 512


def alone_s(num_prompt: int, num_tokens: int) -> float:
    """What a request takes that has the engine to itself, in steps as large as can be."""
    prompt_s = -(-num_prompt // LIMIT) * FIXED_S + num_prompt * (TOKEN_S + CONTEXT_S * num_prompt / 2)
    return prompt_s + sum(FIXED_S + TOKEN_S + CONTEXT_S * (num_prompt + i) for i in range(num_tokens - 1))


class Clocked(World):
    """Steps as the engine takes them: hopeless requests are dropped before each."""

    def __init__(self, num_streams: int = 0, **changes: float | None) -> None:
        super().__init__(num_streams, **changes)
        self.started: set[str] = set()
        self.dropped_s: dict[str, float] = {}

    def step(self) -> None:
        driver = self.driver
        events = driver.scheduler.drop_hopeless(driver.now)
        self.dropped_s.update((event.request_id, driver.now) for event in events)
        assert all(event.finish_reason is FinishReason.DROPPED for event in events)
        assert self.started.isdisjoint(event.request_id for event in events), "dropped after its prefill began"
        driver.take(events)
        if driver.scheduler.has_work:
            driver.step()
        running = driver.scheduler._queue.running
        self.started.update(seq.request_id for seq in running)

    def drain(self, most: int = 5000) -> None:
        while self.driver.scheduler.has_work:
            self.step()
            most -= 1
            assert most


def test_who_waits_longer_than_it_wants_to_is_dropped() -> None:
    world = Clocked(num_streams=1, max_num_seqs=1)
    world.add("patient", 10)
    world.add("impatient", 10, max_queue_s=0.05, n=1)
    for _ in range(30):
        world.step()
    event = world.driver.ends["impatient", 0]
    assert event.finish_reason is FinishReason.DROPPED
    assert event.error.code == "DeadlineError"
    assert "max_queue_ms is 50, and it has been waiting for 5" in str(event.error)
    assert 0.05 < world.dropped_s["impatient"] - world.driver.requests["impatient"].arrival_s < 0.05 + 2 * FIXED_S
    stats = world.driver.scheduler.stats
    assert stats.dropped == {Target.DEADLINE: 0, Target.QUEUE: 1}
    assert (stats.missed[Target.QUEUE], stats.targeted, stats.met) == (1, 1, 0)
    assert stats.num_waiting == 1


def test_who_cannot_be_in_time_is_told_why_at_once() -> None:
    world = Clocked()
    world.add("hopeless", 4000, deadline_s=0.5, n=2)
    world.step()
    for choice in range(2):
        error = str(world.driver.ends["hopeless", choice].error)
        assert "deadline_ms is 500, of which 0 have passed in the queue" in error
        assert "computing it takes at least 18" in error
    assert not world.driver.scheduler.has_work
    check_scheduler(world.driver.scheduler)


def test_what_the_cache_holds_is_not_to_be_computed() -> None:
    world = Clocked(enable_prefix_caching=True)
    world.add("first", 4000)
    world.drain()
    world.add("again", 4001, deadline_s=0.5)
    world.drain()
    assert world.driver.ends["again", 0].finish_reason is FinishReason.LENGTH


def test_an_engine_that_knows_nothing_tries() -> None:
    driver = Driver(config())
    driver.add(request("unsure", (1,) * 60, max_tokens=1, deadline_s=1e-3))
    assert driver.scheduler.drop_hopeless(driver.now) == []
    driver.drain()
    assert driver.ends["unsure", 0].finish_reason is not FinishReason.DROPPED
    assert driver.scheduler.stats.missed[Target.DEADLINE] == 1


@settings(max_examples=40)
@given(
    asked=st.lists(
        st.tuples(
            st.integers(1, 1500),
            st.integers(1, 20),
            st.floats(0.001, 2.0),
            st.one_of(st.none(), st.floats(0.001, 0.5)),
            st.integers(0, 8),
        ),
        max_size=12,
    ),
    num_slots=st.integers(1, 4),
)
def test_nothing_is_dropped_that_could_be_in_time(
    asked: list[tuple[int, int, float, float | None, int]], num_slots: int
) -> None:
    """And nothing that is started is ever dropped (see Clocked); and every request ends."""
    world = Clocked(num_streams=0, max_num_seqs=num_slots)
    for index, (num_prompt, num_tokens, deadline_s, max_queue_s, pause) in enumerate(asked):
        limits = {"deadline_s": deadline_s, "max_queue_s": max_queue_s}
        world.add(f"r{index}", num_prompt, num_tokens, min_tokens=num_tokens, **limits)
        for _ in range(pause):
            world.step()
    world.drain()
    for index, (num_prompt, num_tokens, deadline_s, max_queue_s, _) in enumerate(asked):
        name = f"r{index}"
        arrival_s = world.driver.requests[name].arrival_s
        assert (name, 0) in world.driver.ends
        if name in world.dropped_s:
            now = world.dropped_s[name]
            is_impatient = max_queue_s is not None and now > arrival_s + max_queue_s
            assert is_impatient or now + 1.01 * alone_s(num_prompt, num_tokens) > arrival_s + deadline_s
    check_scheduler(world.driver.scheduler)


@settings(max_examples=40)
@given(num_prompt=st.integers(1, LIMIT), num_tokens=st.integers(1, 30), deadline_s=st.floats(0.005, 0.4))
def test_accepted_work_that_is_left_alone_keeps_its_deadline(
    num_prompt: int, num_tokens: int, deadline_s: float
) -> None:
    world = Clocked()
    world.add("r", num_prompt, num_tokens, min_tokens=num_tokens, deadline_s=deadline_s)
    arrival_s = world.driver.now
    world.drain()
    if "r" in world.dropped_s:
        assert 1.05 * alone_s(num_prompt, num_tokens) > deadline_s
    else:
        assert world.driver.now - arrival_s <= 1.05 * deadline_s


def test_a_preempted_request_is_not_dropped() -> None:
    driver = Driver(config(num_blocks=9, enable_prefix_caching=False))
    for i in range(2):
        driver.add(request(str(i), tuple(range(i, i + 7)), max_tokens=20, eos_token_ids=frozenset(), max_queue_s=0.02))
    while driver.scheduler.has_work:
        assert driver.scheduler.drop_hopeless(driver.now) == []
        driver.step()
    assert driver.scheduler.stats.preemptions > 0
    driver.check_streams()


def test_requests_that_left_long_ago_are_not_kept() -> None:
    world = Clocked()
    for index in range(500):
        world.add(f"r{index}", 3, 1, deadline_s=86_400.0)
        world.step()
    deadlines = world.driver.scheduler.deadlines
    assert deadlines is not None
    assert len(deadlines._heap) < 100


@pytest.mark.parametrize("limits", [{"deadline_s": 10.0}, {"max_queue_s": 10.0}])
def test_who_is_in_time_meets_its_target(limits: dict[str, float]) -> None:
    world = Clocked()
    world.add("r", 100, 5, **limits)
    world.drain()
    stats = world.driver.scheduler.stats
    assert (stats.targeted, stats.met) == (1, 1)
