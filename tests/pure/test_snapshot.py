"""A look at the engine shows every holder of every block, at any moment, and changes nothing."""

from __future__ import annotations

import pytest

from engine.core.scheduling.scheduler import Scheduler
from engine.core.stats import Snapshot
from engine.core.types import AbortCause
from engine.handle import EngineFacts, TakeSnapshot
from engine.loop import Engine
from loadtest.fake_runner import FakeRunner
from tests.patience import PATIENCE_S
from tests.pure.driver import VOCAB, Driver, config, request


def check_adds_up(snapshot: Snapshot, num_blocks: int) -> None:
    """Held, cached and free are the whole pool, and what is held is what the page tables name."""
    named = {block for view in snapshot.sequences for block in view.all_blocks}
    cached = {block for block, is_findable in enumerate(snapshot.findable) if is_findable} - named
    assert len(named) == snapshot.num_held_blocks
    assert len(cached) == snapshot.num_cached_blocks
    assert len(named) + len(cached) + snapshot.num_free_blocks == num_blocks


@pytest.mark.parametrize("depth", [0, 1])
def test_at_every_moment_the_page_tables_name_all_that_is_held(depth: int) -> None:
    """In a pool too small for all, so that some are preempted, with shared prompts, forks and an abort."""
    driver = Driver(config(num_blocks=16), depth)
    asked = [request(f"r{i}", (1, 2, 3, 4, 5, 6, 7 + i), max_tokens=20, seed=i) for i in range(6)]
    asked.append(request("forks", (9, 9, 9), n=3, max_tokens=8, min_tokens=8))
    for each in asked:
        driver.add(each)
    seen: set[str] = set()

    def look() -> None:
        snapshot = driver.scheduler.snapshot()
        check_adds_up(snapshot, 16)
        seen.update(view.status for view in snapshot.sequences)

    for turn in range(500):
        if turn == 5:
            driver.take(driver.scheduler.abort("r1", AbortCause.DISCONNECT, driver.now))
        launched = driver.launch()
        look()
        if driver.launched and (len(driver.launched) > depth or not launched):
            driver.commit()
            look()
    assert not driver.scheduler.has_work
    assert {"waiting", "running", "preempted"} <= seen
    driver.check_streams(aborted={"r1"})


def test_a_sequence_is_shown_as_far_as_it_is() -> None:
    driver = Driver(config())
    driver.add(request("first", (1, 2, 3, 4, 5), max_tokens=8, min_tokens=8))
    for _ in range(3):
        driver.launch()
        driver.commit()
    driver.add(request("second", (1, 2, 3, 4, 9), max_tokens=8, min_tokens=8))
    driver.launch()
    driver.commit()
    first, second = driver.scheduler.snapshot().sequences
    assert (first.request_id, first.status, first.num_prompt) == ("first", "running", 5)
    assert (first.num_tokens, first.num_computed, first.num_cached) == (9, 8, 0)
    assert (second.num_tokens, second.num_computed, second.num_cached) == (6, 5, 4)
    assert second.tables[0][0] == first.tables[0][0], "the shared prompt is one block"


def test_of_many_that_wait_only_some_are_shown_and_all_are_counted() -> None:
    driver = Driver(config(max_num_seqs=6))
    for index in range(16):
        driver.add(request(f"r{index}"))
    snapshot = driver.scheduler.snapshot()
    assert (len(snapshot.sequences), len(snapshot.queue)) == (6, 16)


def test_a_look_is_answered_while_idle() -> None:
    settings = config()
    engine = Engine(Scheduler(settings), FakeRunner(settings, vocab_size=VOCAB), EngineFacts(VOCAB))
    engine.start(lambda events: None)
    snapshot = engine.control(TakeSnapshot()).result(PATIENCE_S)
    engine.stop(drain_s=0)
    assert (snapshot.num_free_blocks, snapshot.sequences) == (24, ())
    assert engine.control(TakeSnapshot()).cancelled(), "the engine has ended"


def test_the_queue_is_shown_in_its_order() -> None:
    driver = Driver(config(max_num_seqs=1, policy="priority"))
    for name, priority in (("runs", 0), ("last", 5), ("next", 1)):
        driver.add(request(name, (1, 2, 3), max_tokens=4, min_tokens=4, priority=priority))
        driver.launch()
        driver.commit()
    assert driver.scheduler.snapshot().queue == ("next", "last")


def test_the_first_event_tells_how_long_it_took() -> None:
    driver = Driver(config(max_num_seqs=1))
    driver.add(request("a", (1, 2, 3), max_tokens=2, min_tokens=2, arrival_s=driver.now))
    driver.add(request("b", (1, 2, 3), max_tokens=0, prompt_logprobs=0, arrival_s=driver.now))
    driver.drain()
    first, second = driver.prompts["a", 0], driver.prompts["b", 0]
    assert (first.queue_s, first.prefill_s) == (pytest.approx(0.01), pytest.approx(0.01))
    assert second.queue_s > first.queue_s
    assert second.prefill_s == 0  # nothing was drawn
