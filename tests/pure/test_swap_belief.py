"""What copying and computing are believed to cost follows the machine, and so does what preemption does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.budget import Load, StepTime
from engine.core.fake_runner import FakeRunner, FakeStep
from engine.core.kv.swap_belief import SwapBelief
from engine.core.kv.swap_costs import SwapCosts
from engine.core.stats import PreemptionKind, Stats
from engine.core.step import Moves, StepPlan
from tests.pure.driver import VOCAB, Driver, config, fail, request

MEASURED = SwapCosts(trip_s=0.001, block_s=0.004, token_s=0.001)


def belief(times: StepTime | None = None) -> tuple[SwapBelief, Stats]:
    stats = Stats()
    return SwapBelief(MEASURED, 16, times or StepTime(), stats), stats


def test_it_begins_with_what_was_measured() -> None:
    believed, stats = belief()
    assert (stats.swap_block_s, stats.compute_block_s) == (0.004, 0.016)
    assert not believed.pays_to_save(4)
    assert believed.pays_to_save(6)
    assert believed.pays_to_bring(0, 3), "it is one way only"
    assert not believed.pays_to_bring(0, 2)


@given(seen_s=st.floats(1e-6, 1.0), sizes=st.lists(st.integers(1, 64), min_size=1, max_size=40))
def test_copies_are_followed_as_far_as_there_are_blocks(seen_s: float, sizes: list[int]) -> None:
    believed, stats = belief()
    for num_blocks in sizes:
        before = believed.block_s
        believed.learn(Moves(num_blocks, (MEASURED.trip_s + num_blocks * seen_s) / 2))
        assert min(before, seen_s) * 0.999 <= believed.block_s <= max(before, seen_s) * 1.001
    left = 0.98 ** sum(sizes)
    assert stats.swap_block_s == pytest.approx(left * MEASURED.block_s + (1 - left) * seen_s, rel=1e-3)


def test_computing_is_followed_by_the_model_of_steps() -> None:
    times = StepTime()
    believed, stats = belief(times)
    for step in range(200):
        count, start = 16 * (step % 7 + 1), 100 * (step % 5)
        load = Load(num_decodes=step % 3).with_chunk(start, count) if step % 2 else Load(num_decodes=step % 3 + 1)
        times.observe(load, 0.004 + 0.0001 * load.num_decodes + 0.0002 * load.num_prompt_tokens)
    believed.tell()
    assert stats.compute_block_s == pytest.approx(16 * 0.0002, rel=0.1)
    assert not believed.pays_to_save(160), "a machine that computes five times as fast as was measured"


def test_what_is_not_tried_is_tried_again_in_the_end() -> None:
    believed, _ = belief()
    believed.learn(Moves(64, 64.0))
    assert not believed.pays_to_save(1000)
    tries = 0
    while not believed.pays_to_save(1000):
        tries += 1
    assert 20 < tries < 1000


class Machine(FakeRunner):
    """Every block takes `block_s` each way, and is waited for."""

    block_s = 0.0

    def run(self, plan: StepPlan) -> FakeStep:
        step, num_blocks = super().run(plan), len(plan.swap_out) + len(plan.swap_in)
        seconds = num_blocks * self.block_s
        step._result.moves = Moves(num_blocks, seconds, seconds)
        return step


def test_preemption_changes_its_mind_as_the_machine_does() -> None:
    sizes = config(num_blocks=9, num_host_blocks=40, swap_costs=SwapCosts(token_s=0.002))
    machine = Machine(sizes, vocab_size=VOCAB, fail=fail)

    def step_s(plan: StepPlan) -> float:
        return 0.001 + 0.002 * plan.num_tokens + machine.block_s * (len(plan.swap_out) + len(plan.swap_in))

    driver = Driver(sizes, cost=step_s)
    driver.runner = machine
    counts = []
    for phase, (block_s, num_requests) in enumerate([(0.0, 40), (0.1, 40), (0.0, 200)]):
        machine.block_s = block_s
        before = dict(driver.scheduler.stats.preempted)
        for index in range(num_requests):
            prompt = tuple((7 * index + i * i + phase) % 50 for i in range(7))
            asked = request(f"{phase}.{index}", prompt, max_tokens=20, seed=index, eos_token_ids=frozenset())
            driver.add(asked)
        driver.drain()
        counts.append({kind: driver.scheduler.stats.preempted[kind] - before[kind] for kind in PreemptionKind})
    driver.check_streams()
    fast, slow, again = counts
    assert fast[PreemptionKind.RECOMPUTE] == 0 < fast[PreemptionKind.SWAP]
    assert slow[PreemptionKind.RECOMPUTE] > 4 * slow[PreemptionKind.SWAP] > 0
    assert again[PreemptionKind.SWAP] > again[PreemptionKind.RECOMPUTE]
