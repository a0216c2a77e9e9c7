"""Background requests: they run in steps that nobody else needs, give way at once, and lose nothing by it."""

from __future__ import annotations

import pytest

from engine.core.errors import OverloadedError
from engine.core.queues import POLICIES
from engine.core.scheduling.scheduler import Scheduler
from engine.handle import EngineFacts
from engine.loop import Engine
from engine.overload import QueueLimits
from loadtest.fake_runner import FakeRunner
from tests.pure.driver import VOCAB, Driver, config, request

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def planned(driver: Driver) -> set[str]:
    """Whose tokens the last plan computes."""
    return {seq.request_id for seq in driver.scheduler._in_flight[-1].sequences}


def steps_to_end(driver: Driver, name: str) -> int:
    """Plans that are launched until the request has ended."""
    before = driver.runner.num_steps
    while (name, 0) not in driver.ends:
        driver.step()
        assert driver.runner.num_steps - before < 100
    return driver.runner.num_steps - before


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_everybody_else_comes_first_under_every_policy(policy: str) -> None:
    driver = Driver(config(policy=policy, max_num_seqs=1))
    lowest = {"max_tokens": 1, "priority": -(2**31), "is_background": True}
    driver.add(request("old", arrival_s=0.0, **lowest))
    driver.add(request("older", arrival_s=-0.01, **lowest))
    driver.add(request("young", arrival_s=1e7, max_tokens=3, priority=2**31 - 1))
    assert [seq.request_id for seq in driver.scheduler._queue.waiting] == ["young", "older", "old"]
    driver.drain()
    assert [name for name, _ in driver.ends] == ["young", "older", "old"]


@DEPTHS
def test_a_request_takes_as_many_steps_as_on_an_idle_engine(depth: int) -> None:
    """No slot and no block is free, the background has them all: whoever comes has both after the steps in flight."""
    settings = config(max_num_batched_tokens=24)
    idle = Driver(settings, depth)
    idle.add(request("online", tuple(range(20)), max_tokens=12, eos_token_ids=frozenset()))
    alone = steps_to_end(idle, "online")

    driver = Driver(settings, depth)
    for i in range(9):
        driver.add(request(f"batch-{i}", (i, 1, 2), max_tokens=30, eos_token_ids=frozenset(), is_background=True))
    for _ in range(10):
        driver.step()
    stats = driver.scheduler.stats
    assert stats.num_background_running == stats.num_running == 6
    assert stats.num_background_waiting == 3
    assert stats.num_waiting == stats.num_waiting_tokens == 0
    driver.add(request("online", tuple(range(20)), max_tokens=12, eos_token_ids=frozenset()))
    assert steps_to_end(driver, "online") <= alone + depth + 1
    assert stats.preempted
    driver.drain()
    driver.check_streams()


def test_its_steps_are_small_for_whoever_comes_waits_for_one() -> None:
    driver = Driver(config(max_num_batched_tokens=24))
    for i in range(4):
        driver.add(request(f"batch-{i}", tuple(range(20)), max_tokens=9, is_background=True))
    sizes = []
    while driver.scheduler.has_work:
        assert driver.launch()
        sizes.append(driver.scheduler._in_flight[-1].num_tokens)
        driver.commit()
    assert max(sizes) == 6, "a quarter of a step's 24 tokens, all of which it uses"
    driver.check_streams()
    alone = Driver(config(max_num_batched_tokens=24))
    alone.add(request("online", tuple(range(24)), max_tokens=1))
    alone.launch()
    assert alone.scheduler._in_flight[-1].num_tokens == 24, "anybody else has the whole step"


def test_while_others_live_it_pauses_and_keeps_its_blocks() -> None:
    driver = Driver(config())
    driver.add(request("batch", max_tokens=9, eos_token_ids=frozenset(), is_background=True))
    driver.step()
    assert planned_next(driver) == {"batch"}
    driver.add(request("online", (4, 5), max_tokens=4, eos_token_ids=frozenset()))
    held = driver.scheduler.stats.blocks_held
    while ("online", 0) not in driver.ends:
        assert planned_next(driver) == {"online"}
        assert driver.scheduler.stats.blocks_held >= held
    assert planned_next(driver) == {"batch"}
    driver.drain()
    driver.check_streams()
    assert driver.scheduler.stats.preemptions == 0


def planned_next(driver: Driver) -> set[str]:
    driver.launch()
    names = planned(driver)
    driver.commit()
    return names


def test_its_waits_are_in_no_latency_but_its_tokens_are_counted() -> None:
    driver = Driver(config())
    driver.add(request("batch", max_tokens=5, eos_token_ids=frozenset(), is_background=True))
    driver.drain()
    stats = driver.scheduler.stats
    assert (stats.prompt_tokens, stats.generation_tokens) == (3, 5)
    latencies = (stats.queue_s, stats.ttft_s, stats.prefill_s, stats.itl_s, stats.tpot_s, stats.decode_s, stats.e2e_s)
    assert [histogram.count for histogram in latencies] == [0] * 7
    driver.add(request("online", max_tokens=5, eos_token_ids=frozenset()))
    driver.drain()
    assert [histogram.count for histogram in latencies] == [1, 1, 1, 4, 1, 1, 1]


def test_what_waits_of_it_fills_no_queue() -> None:
    """The door counts those who are really ahead; the background is behind."""
    settings = config(max_num_seqs=2)
    engine = Engine(Scheduler(settings), FakeRunner(settings), EngineFacts(VOCAB), limits=QueueLimits(max_requests=1))
    engine.stats.num_running = engine.stats.num_background_running = 2
    engine.stats.num_background_waiting = 50
    engine.submit(request("a"))
    engine.stats.num_background_running = 0
    engine._inbox.take()
    engine.stats.num_waiting = 1
    with pytest.raises(OverloadedError, match="1 requests wait already"):
        engine.submit(request("b"))
