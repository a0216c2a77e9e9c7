"""Copies that fail half way, in any direction, between any two tiers: no stream changes, and no block is lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.errors import CopyError
from engine.core.in_flight import InFlightStep
from engine.core.kv.host_tier import HostTier
from engine.core.scheduling.scheduler import Scheduler
from engine.core.stats import PreemptionKind
from engine.core.step import StepPlan
from engine.core.types import FinishReason, TokenEvent
from engine.handle import EngineFacts
from engine.loop import Engine
from loadtest.fake_runner import FakeRunner
from tests.integrity import check_scheduler
from tests.pure.driver import Driver, config, request, solo
from tests.pure.test_tiers import prompt, tiered

DEEDS = ("step", "step", "memory", "spill", "read", "write")


def copies_fail(driver: Driver, num_out: int, num_in: int | None) -> None:
    """The next step fails in its copies: after so many to the host, or, with `num_in`, so many from there."""
    while driver.launched:
        driver.commit()
    plan = driver.scheduler.plan(driver.now)
    if plan is None:
        return
    out = plan.swap_out[:num_out] if num_in is None else plan.swap_out
    copies = () if num_in is None else plan.copies
    partly = StepPlan(plan.step_id, copies=copies, swap_out=out, swap_in=plan.swap_in[: num_in or 0])
    driver.runner.run(partly).wait()
    driver.take(driver.scheduler.roll_back(driver.now))
    driver.scheduler.give_up_copies()


@settings(max_examples=60)
@given(
    depth=st.integers(0, 3),
    num_host=st.sampled_from([6, 14, 40]),
    turns=st.lists(
        st.tuples(st.sampled_from(DEEDS), st.integers(0, 3), st.integers(0, 3), st.booleans()), min_size=10, max_size=60
    ),
    fault_at=st.integers(5, 60),  # copies fail once: there are none after that
    num_done=st.tuples(st.integers(0, 3), st.sampled_from([None, 0, 1, 2])),
)
def test_whatever_fails_on_the_way_only_work_is_lost(
    depth: int,
    num_host: int,
    turns: list[tuple[str, int, int, bool]],
    fault_at: int,
    num_done: tuple[int, int | None],
) -> None:
    driver = tiered(depth, num_blocks=9, num_host_blocks=num_host, num_disk_blocks=20)
    for i in range(4):  # more than the pool holds, once they have got on
        driver.add(request(f"crowd{i}", prompt(i, 7), max_tokens=20, seed=i, eos_token_ids=frozenset()))
    for _ in range(12):
        driver.step()
    for index, (deed, first, count, arrives) in enumerate(turns):
        if arrives:
            asked = prompt(10 * first, 7)
            driver.add(request(str(index), asked, max_tokens=16, seed=index, arrival_s=driver.now, n=1 + first // 3))
        if index == fault_at:
            copies_fail(driver, *num_done)
        elif deed == "memory":
            driver.run_out_of_memory()
        elif deed == "spill" and not driver.launched:
            driver.scheduler.tiers.spill()
            if not count:  # it fails half way, and the next one finds it so
                driver.scheduler.tiers.spill()
            driver.scheduler.tiers.unstage()  # saves begin after copies that were made only
        elif deed in ("read", "write"):
            driver.transfer(count, is_good=False)
        else:
            for _ in range(1 + count):
                driver.step()
        check_scheduler(driver.scheduler)
    driver.drain()
    driver.check_streams()


@pytest.mark.parametrize("num_done", range(4))
@pytest.mark.parametrize("way", ["out", "in"])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_swap_that_fails_is_computed_anew(depth: int, way: str, num_done: int) -> None:
    driver = Driver(config(num_blocks=9, num_host_blocks=40), depth)
    for i in range(4):
        driver.add(request(str(i), prompt(i, 7), max_tokens=20, seed=i, eos_token_ids=frozenset(), arrival_s=i))
    stats = driver.scheduler.stats
    while not (stats.preempted[PreemptionKind.SWAP] if way == "out" else stats.swapped_blocks):
        driver.step()
    copies_fail(driver, num_done, None if way == "out" else num_done)
    swapped = stats.preempted[PreemptionKind.SWAP]
    check_scheduler(driver.scheduler)
    assert stats.host_blocks_held == 0
    driver.drain()
    driver.check_streams()
    assert stats.preempted[PreemptionKind.SWAP] == swapped, "nobody is copied after that"
    assert stats.failed_copies == 1


class Broken(FakeRunner):
    """Copies some of a plan's blocks and fails."""

    num_failed = 0

    def run(self, plan: StepPlan) -> Any:
        if plan.swap_out or plan.swap_in:
            self.num_failed += 1
            super().run(StepPlan(plan.step_id, swap_out=plan.swap_out[:1]))
            raise CopyError("RuntimeError: the host is on fire")
        return super().run(plan)


@pytest.mark.parametrize("depth", [0, 1])
def test_the_engine_goes_on_without_copies(depth: int, caplog: pytest.LogCaptureFixture) -> None:
    sizes = config(num_blocks=9, num_host_blocks=40, host_caching=True)
    runner = Broken(sizes, vocab_size=50)
    engine = Engine(Scheduler(sizes), runner, EngineFacts(50), depth=depth)
    said: dict[str, list[int]] = {}
    reasons: list[FinishReason] = []

    def deliver(events: Iterable[TokenEvent]) -> None:
        for event in events:
            said.setdefault(event.request_id, []).extend(event.token_ids)
            if event.finish_reason is not None:
                reasons.append(event.finish_reason)

    asked = [request(str(i), prompt(i, 7), max_tokens=20, seed=i, eos_token_ids=frozenset()) for i in range(6)]
    engine.submit(*asked)
    engine.start(deliver)
    engine.stop(drain_s=60.0)
    assert said == {each.request_id: solo(each, 0)[0] for each in asked}
    assert reasons == [FinishReason.LENGTH] * 6
    assert runner.num_failed == 1
    assert engine.stats.failed_copies == 1
    assert engine.stats.out_of_memory_steps == engine.stats.integrity_failures == 0
    assert "the host is on fire" in caplog.text


def test_a_host_block_has_a_content_only_once_its_copy_is_done() -> None:
    """It is saved from then on: a save before would write what was there earlier under the new name."""
    host = HostTier(1, 4)
    for name in (b"earlier", b"later"):
        host.offload(name, 7)
        assert not host.has_content(name, 0), "the copy is due"
        step = InFlightStep(swap_out=host.take_due())
        assert not host.has_content(name, 0), "the copy is in flight"
        assert host.settle(step, is_done=True) == [(name, 0)]
        assert host.has_content(name, 0)
