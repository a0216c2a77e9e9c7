"""Preempted sequences whose blocks go to the host and come back: the same tokens, and both pools add up at every step."""

from __future__ import annotations

import random

import pytest

from engine.core.scheduling.prompts import PromptPlan
from engine.core.scheduling.running import RunningQueue
from engine.core.stats import PreemptionKind, SwapDirection
from engine.core.types import AbortCause
from tests.integrity import check_scheduler
from tests.pure.driver import Driver, config, request


def long_prompt(length: int, first: int = 1) -> tuple[int, ...]:
    return tuple((first + i) % 50 for i in range(length))


def crowd(driver: Driver, num: int = 4, max_tokens: int = 20) -> None:
    """More than nine blocks of four can hold."""
    for i in range(num):
        prompt = long_prompt(7, i)
        driver.add(request(str(i), prompt, max_tokens=max_tokens, seed=i, eos_token_ids=frozenset(), arrival_s=i))


@pytest.mark.parametrize("caching", [False, True], ids=["", "caching"])
@pytest.mark.parametrize("depth", [0, 1])
def test_nothing_that_was_swapped_is_computed_again(depth: int, caching: bool) -> None:
    computed = {}
    for num_host_blocks in (0, 40):
        driver = Driver(config(num_blocks=9, enable_prefix_caching=caching, num_host_blocks=num_host_blocks), depth)
        crowd(driver)
        driver.drain()
        driver.check_streams()
        stats = driver.scheduler.stats
        kinds = [PreemptionKind.RECOMPUTE, PreemptionKind.SWAP]
        assert [stats.preempted[kind] > 0 for kind in kinds] == [not num_host_blocks, bool(num_host_blocks)]
        assert stats.preemptions == sum(event.timings.num_preemptions for event in driver.ends.values())  # type: ignore[union-attr]
        computed[num_host_blocks] = stats.step_tokens.sum
    moved = stats.swapped_blocks
    assert moved[SwapDirection.OUT] >= moved[SwapDirection.IN] > 0
    assert (moved[SwapDirection.OUT] == moved[SwapDirection.IN]) == (not caching)
    assert computed[40] == 4 * (7 + 20 - 1) < computed[0]


def test_others_do_not_wait_for_what_is_brought_back() -> None:
    driver = Driver(config(num_blocks=12, num_host_blocks=40))
    for i in range(5):
        driver.add(request(str(i), long_prompt(7, i), max_tokens=12 + 4 * i, eos_token_ids=frozenset(), arrival_s=i))
    num_deferred = 0
    while driver.scheduler.has_work:
        plan = driver.scheduler.plan(driver.now)
        assert plan is not None
        arriving = {block for _, block in plan.swap_in}
        pending = driver.runner.run(plan)
        slots = [*plan.slots, *(chunk.slot for chunk in plan.chunks)]
        readers = [slot for slot in slots if not arriving.isdisjoint(driver.runner.tables[slot][0])]
        assert readers in ([], slots[:1]), "only who would find nothing to wait beside computes at once"
        num_deferred += bool(arriving and not readers)
        driver.take(driver.scheduler.commit(plan, pending.wait(), driver.now))
    assert num_deferred
    driver.check_streams()


def test_who_is_alone_computes_while_its_blocks_arrive() -> None:
    driver = Driver(config(num_blocks=9, num_host_blocks=40, enable_prefix_caching=False))
    crowd(driver, num=2, max_tokens=24)
    while not driver.scheduler.stats.num_preempted:
        driver.step()
    driver.take(driver.scheduler.abort("0", AbortCause.DISCONNECT, driver.now))
    plan = driver.scheduler.plan(driver.now)
    assert plan is not None
    assert plan.swap_in
    (chunk,) = plan.chunks
    assert chunk.num_tokens == plan.num_tokens == 1
    driver.take(driver.scheduler.commit(plan, driver.runner.run(plan).wait(), driver.now))
    driver.drain()
    driver.check_streams(aborted={"0"})


@pytest.mark.parametrize("depth", [0, 1])
def test_a_full_host_pool_leaves_the_rest_to_be_computed_anew(depth: int) -> None:
    driver = Driver(config(num_blocks=9, num_host_blocks=4, enable_prefix_caching=False), depth)
    crowd(driver)
    driver.drain()
    driver.check_streams()
    assert all(driver.scheduler.stats.preempted.values())


def test_a_sequence_of_one_block_is_recomputed() -> None:
    driver = Driver(config(num_blocks=4, block_size=16, num_host_blocks=40))
    crowd(driver, num=8, max_tokens=8)
    driver.add(request("long", long_prompt(40, 30), max_tokens=20, eos_token_ids=frozenset(), arrival_s=9))
    driver.drain()
    assert driver.scheduler.stats.preempted[PreemptionKind.SWAP] == 0
    driver.check_streams()


def test_the_prefix_cache_is_asked_before_the_host() -> None:
    """What is still in the pool need not be copied back: all but the block that was not full."""
    driver = Driver(config(num_blocks=8, num_host_blocks=40))
    for i in range(2):
        driver.add(request(str(i), long_prompt(7 - i, i), max_tokens=20, eos_token_ids=frozenset(), arrival_s=i))
    while not driver.scheduler.stats.num_preempted:
        driver.step()
    driver.take(driver.scheduler.abort("0", AbortCause.DISCONNECT, driver.now))
    driver.drain()
    moved = driver.scheduler.stats.swapped_blocks
    assert (moved[SwapDirection.OUT], moved[SwapDirection.IN]) == (4, 1)
    driver.check_streams(aborted={"0"})


@pytest.mark.parametrize("depth", [0, 1])
def test_forks_are_swapped_each_for_itself(depth: int) -> None:
    driver = Driver(config(num_blocks=8, num_host_blocks=40), depth)
    driver.add(request("n", long_prompt(6), n=4, max_tokens=14, eos_token_ids=frozenset()))
    driver.drain()
    assert driver.scheduler.stats.preempted[PreemptionKind.SWAP] > 0
    driver.check_streams()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("turns", range(10, 60, 2))
def test_an_abort_frees_both_sides(depth: int, turns: int) -> None:
    driver = Driver(config(num_blocks=9, num_host_blocks=12), depth)
    crowd(driver, num=6)
    for _ in range(turns):
        driver.step()
        check_scheduler(driver.scheduler)
    for i in (5, 1, 3):
        driver.take(driver.scheduler.abort(str(i), AbortCause.DISCONNECT, driver.now))
        check_scheduler(driver.scheduler)
    driver.drain()
    driver.check_streams(aborted={"1", "3", "5"})


@pytest.mark.parametrize("seed", range(24))
def test_a_step_that_is_taken_back_takes_its_copies_with_it(seed: int) -> None:
    """At both depths, with and without caching, in turn."""
    chance = random.Random(seed)
    settings = config(num_blocks=9, num_host_blocks=30, enable_prefix_caching=seed % 4 > 1)
    driver = Driver(settings, depth=seed % 2)
    crowd(driver, num=5)
    driver.add(request("n", long_prompt(6, 30), n=3, max_tokens=9, eos_token_ids=frozenset()))
    for _ in range(150):
        if chance.random() < 0.25:
            driver.run_out_of_memory()
        else:
            driver.step()
        check_scheduler(driver.scheduler)
    driver.drain()
    assert driver.scheduler.stats.preempted[PreemptionKind.SWAP] > 0
    driver.check_streams()


def test_waiting_tokens_are_those_still_to_compute() -> None:
    driver = Driver(config(num_blocks=9, num_host_blocks=40, enable_prefix_caching=False))
    crowd(driver, num=2)
    while not driver.scheduler.stats.num_preempted:
        driver.step()
    assert driver.scheduler.stats.num_waiting_tokens == 1
    (swapped,) = [view for view in driver.scheduler.snapshot().sequences if view.status == "preempted"]
    assert swapped.tables == ()
    driver.drain()
    driver.check_streams()


def test_a_plan_may_move_blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that was admitted loads its blocks, though nothing is computed."""
    driver = Driver(config(num_blocks=6, policy="fair", num_host_blocks=20, host_caching=True))
    driver.add(request("first", tuple(range(9)), max_tokens=1))
    driver.drain()
    driver.add(request("other", tuple(range(20, 43)), max_tokens=1))
    driver.drain()
    driver.add(request("next", (*range(8), 40, 41)))
    monkeypatch.setattr(RunningQueue, "due", lambda queue, *_, **__: [])
    monkeypatch.setattr(PromptPlan, "finish", lambda *_: None)
    assert driver.launch()
    plan = driver.launched[0][0]
    assert plan.swap_in
    assert not plan.num_slices
    monkeypatch.undo()
    driver.drain()
    driver.check_streams()
