"""The model of a step's seconds, against costs that are known."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.budget import Costs, Load, StepBudget, StepTime
from tests.pure.driver import Driver, config, request

CPU = Costs(fixed_s=4.5e-3, decode_s=0.2e-3, decode_context_s=0.3e-6, token_s=0.24e-3, context_s=0.12e-6)
GPU = Costs(fixed_s=8e-3, chunked_s=4e-3, decode_s=0.02e-3, decode_context_s=0.03e-6, token_s=0.03e-3, context_s=0.5e-9)
FLAT = Costs(fixed_s=10e-3)


def cost(truth: Costs, load: Load) -> float:
    return sum(a * b for a, b in zip(truth, load.features, strict=True))


def some_load(rng: random.Random) -> Load:
    num_decodes = rng.randrange(32)
    load = Load(num_decodes, num_decodes * rng.randrange(50, 2000))
    if not num_decodes or rng.random() < 0.4:
        load = load.with_chunk(rng.randrange(8000), rng.choice((1, 4, 16, 64, 256, 512)))
    return load


def taught(truth: Costs, num: int, noise: float = 0.05, outliers: float = 0.0, seed: int = 0) -> StepTime:
    rng, times = random.Random(seed), StepTime()
    for _ in range(num):
        load = some_load(rng)
        spike = rng.choice((0.05, 20.0)) if rng.random() < outliers else 1.0
        times.observe(load, cost(truth, load) * rng.lognormvariate(0, noise) * spike)
    return times


def error(times: StepTime, truth: Costs) -> float:
    """The 90th percentile of relative errors, over loads of all kinds."""
    rng = random.Random(99)
    loads = [some_load(rng) for _ in range(400)]
    return sorted(abs(times.seconds(load) / cost(truth, load) - 1) for load in loads)[360]


@pytest.mark.parametrize("truth", [CPU, GPU, FLAT])
@pytest.mark.parametrize("seed", range(4))
def test_a_few_hundred_steps_teach_any_machine(truth: Costs, seed: int) -> None:
    assert error(taught(truth, 500, seed=seed), truth) < 0.1


@pytest.mark.parametrize("seed", range(4))
def test_without_noise_forty_steps_do(seed: int) -> None:
    assert error(taught(CPU, 40, noise=0.0, seed=seed), CPU) < 0.05


@pytest.mark.parametrize("seed", range(4))
def test_steps_that_took_twenty_times_too_long_or_too_short_are_shrugged_off(seed: int) -> None:
    assert error(taught(CPU, 1000, outliers=0.04, seed=seed), CPU) < 0.2


def test_a_machine_that_becomes_slower_is_followed() -> None:
    times, rng = taught(CPU, 1000), random.Random(5)
    slower = Costs(*(2 * weight for weight in CPU))
    for _ in range(1000):
        load = some_load(rng)
        times.observe(load, cost(slower, load))
    assert error(times, slower) < 0.1


def test_hours_without_prompts_do_not_unsettle_what_was_known_of_them() -> None:
    times, rng = taught(CPU, 500), random.Random(3)
    for _ in range(20_000):
        load = Load(8, 8 * rng.randrange(500, 600))
        times.observe(load, cost(CPU, load) * rng.lognormvariate(0, 0.05))
    before = times.chunk_s(1000, 100)
    times.observe(Load(8, 4000).with_chunk(1000, 100), 1.3 * cost(CPU, Load(8, 4000).with_chunk(1000, 100)))
    assert 0.7 * before < times.chunk_s(1000, 100) < 1.6 * before


def test_a_clock_that_stands_still_teaches_nothing() -> None:
    times = taught(CPU, 100)
    before = times.costs
    times.observe(Load(8, 800), 0.0)
    assert times.costs == before


@given(seconds=st.floats(1e-4, 1.0), start=st.integers(0, 100_000))
def test_so_many_tokens_take_so_many_seconds(seconds: float, start: int) -> None:
    times = StepTime()
    times.costs = CPU
    count = times.tokens_within(seconds, start)
    token_s, context_s = CPU.token_s, CPU.context_s
    assert count * (token_s + context_s * (start + count / 2)) == pytest.approx(seconds)
    assert times.chunk_s(start, int(count)) <= seconds * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_what_steps_that_are_all_alike_cost_is_what_they_took(seed: int) -> None:
    rng, times = random.Random(seed), StepTime()
    for num in range(30):
        loads = [
            Load().with_chunk(0, 280) if num < 2 else Load().with_chunk(272, 8),
            *(Load(1, 281 + i) for i in range(3)),
        ]
        for load in loads:
            times.observe(load, cost(CPU, load) * rng.lognormvariate(0, 0.1))
    costs, seen = times.costs, Load(1, 282)
    assert min(costs) >= 0.0
    assert costs.fixed_s + costs.decode_s + costs.decode_context_s * 282 == pytest.approx(cost(CPU, seen), rel=0.3)
    answer = sum([costs.fixed_s + costs.decode_s + costs.decode_context_s * (30 + place) for place in range(299)])
    assert answer < 1.3 * sum([cost(CPU, Load(1, 30 + place)) for place in range(299)])


def test_what_costs_nothing_is_not_held_back() -> None:
    times = StepTime()
    assert times.tokens_within(0.1, 0) == float("inf")
    assert times.tokens_within(float("inf"), 0) == float("inf")
    assert times.tokens_within(0.0, 0) == times.tokens_within(-1.0, 5) == 0


def test_a_draft_costs_what_a_decode_does() -> None:
    """One sequence decodes all the time; only its drafts make steps longer."""
    driver = Driver(config())
    driver.add(request())
    driver.step()
    plan = driver.scheduler.plan(driver.now)
    assert plan is not None
    budget = StepBudget(config())
    for index in range(400):
        num_drafts = index // 8 % 4
        budget.observe(None, plan.positions, num_drafts, 1.0 + num_drafts)
    assert budget.times.seconds(Load(4, 4 * plan.positions[0])) == pytest.approx(4.0, rel=0.1)
