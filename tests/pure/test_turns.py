"""Whose turn a step is: what a newcomer waits for beside a tenant that holds most, where steps cost exactly what is said."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.step_time import Load, StepTime
from engine.core.turns import LATELY_S, LONGEST, PATIENCE, PRICE, WAIT, Turns
from tests.pure.test_fairness import owners
from tests.pure.world import CONTEXT_S, FIXED_S, TOKEN_S, World

BUDGET = 512


class Crowd(World):
    """A greedy tenant's endless streams, in an engine that knows what its steps take."""

    def __init__(self, num: int = 60, **changes: float | str | None) -> None:
        super().__init__(num_streams=0, policy="fair", **changes)  # type: ignore[arg-type]
        self.num, self.steps = num, list[tuple[list[str], float]]()  # whose tokens, and seconds
        for index in range(num):
            self.add(f"g{index}", 50, max_tokens=20_000, tenant="greedy")
        self.step(10)

    def step(self, num: int = 1) -> None:
        for _ in range(num):
            before = self.driver.now
            self.driver.launch()
            names = owners(self.driver)
            self.driver.commit()
            self.steps.append((names, self.driver.now - before))

    def visit(self, name: str, num_prompt: int, tenant: str = "light", max_tokens: int = 1) -> float:
        """A newcomer; how long it takes until its first token, from the moment at which the next step would begin."""
        self.add(name, num_prompt, max_tokens, tenant=tenant)
        began = self.driver.now
        while (name, 0) not in self.driver.streams:
            self.step()
        return self.driver.now - began


def own_s(num_prompt: int) -> float:
    """What a prompt's own step takes."""
    return FIXED_S + num_prompt * (TOKEN_S + CONTEXT_S * num_prompt / 2)


def test_steps_of_whoever_holds_most_are_cut_while_newcomers_are_likely() -> None:
    world = Crowd()
    whole = world.steps[-1]
    assert len(whole[0]) == world.num
    assert world.visit("first", 200) == pytest.approx(own_s(200))
    world.steps.clear()
    world.step(30)
    names = [name for step, _ in world.steps for name in step]
    assert max(taken for _, taken in world.steps) <= 1.02 * WAIT * own_s(200) < 0.9 * whole[1]
    counts = [names.count(f"g{index}") for index in range(world.num)]
    assert max(counts) - min(counts) <= 1, "they take turns"


@pytest.mark.parametrize(("num_asked", "num_prompt", "max_tokens"), [(1, 4, 3), (8, 4, 2)])
def test_whatever_a_tenant_sends_its_streams_have_their_turns(num_asked: int, num_prompt: int, max_tokens: int) -> None:
    world = Crowd(max_num_seqs=128)
    world.visit("first", 200)
    world.steps.clear()
    for count in range(150):
        if count % 50 == 0:
            world.visit(f"light{count}", 200)
        for index in range(num_asked):
            world.add(f"short{count}.{index}", num_prompt, max_tokens=max_tokens, tenant="greedy")
        world.step()
    parts = [set(names) for names, _ in world.steps]
    for index in range(world.num):
        turns = [-1, *(step for step, names in enumerate(parts) if f"g{index}" in names), len(parts)]
        gaps = [after - before for before, after in pairwise(turns)]
        assert 2 <= max(gaps) <= 4, "two parts, and the step of a newcomer's own"


def test_a_part_has_a_part_of_the_prompts_too() -> None:
    """So that these are not held up by more than the price: as much of them beside as many decodes."""
    world = Crowd(20)
    world.visit("new", 250)
    world.steps.clear()
    assert world.visit("more", 300, tenant="greedy") <= (1 + PRICE) * (own_s(300) + 20 * TOKEN_S) + 0.25 * own_s(300)
    assert len(world.steps) > 3
    assert max(taken for _, taken in world.steps) <= 1.2 * WAIT * own_s(250)


def test_without_newcomers_steps_are_whole() -> None:
    world = Crowd()
    world.step(5)
    assert len(world.steps[-1][0]) == world.num
    world.visit("new", 200)
    world.step()
    assert len(world.steps[-1][0]) < world.num
    world.driver.now += LATELY_S
    world.step()
    assert len(world.steps[-1][0]) == world.num


def test_among_equals_steps_are_whole() -> None:
    world = Crowd(30)
    for index in range(30):
        world.add(f"equal{index}", 50, max_tokens=20_000, tenant="equal")
    world.step(80)
    world.visit("third", 200, tenant="third")
    world.step()
    assert len(world.steps[-1][0]) == 60


def test_whoever_comes_often_is_not_waited_for_as_long() -> None:
    world = Crowd()
    for index in range(80):
        world.visit(f"n{index}", 200)
        world.driver.now += 0.5
    world.driver.now += PATIENCE * 1.0
    world.step(2)
    assert len(world.steps[-1][0]) == world.num


def test_while_others_wait_already_steps_are_whole() -> None:
    world = Crowd(40, max_num_seqs=40)
    [account] = {seq.account for seq in world.driver.scheduler._roster.running}
    world.visit("first", 200)
    for index in range(30):
        world.add(f"o{index}", 40, max_tokens=20_000, tenant="other")
    world.step(80)
    assert world.driver.scheduler._roster.waiting.has_others(account)
    assert len(world.steps[-1][0]) == 40


def test_a_prompt_of_some_steps_has_most_of_each() -> None:
    """And one of very many goes along with all others."""
    world = Crowd(24)
    took = world.visit("long", 2 * BUDGET)
    assert took <= 1.3 * (2 * BUDGET * (TOKEN_S + CONTEXT_S * BUDGET) + 4 * FIXED_S)
    assert all(len(names) > 24 for names, _ in world.steps[-3:])
    longer = Crowd(24)
    took = longer.visit("longer", LONGEST * BUDGET + 1)
    assert took > 2 * own_s(LONGEST * BUDGET + 1)


@given(
    rows=st.integers(1, 128),
    num_prompt=st.integers(0, 400),
    newcomer=st.integers(1, 512),
    fixed=st.floats(0.0, 0.05),
    token=st.floats(1e-5, 1e-3),
)
@settings(max_examples=200)
def test_parts_are_short_enough_or_as_short_as_is_affordable(
    rows: int, num_prompt: int, newcomer: int, fixed: float, token: float
) -> None:
    times = StepTime()
    times.weights = [fixed, 0.0, token, 0.0, token, 0.0]
    times._num_chunks = 4
    turns = Turns(BUDGET)
    turns._num_tokens = newcomer
    load = Load(rows, 0, num_prompt)
    num = turns.num_parts(load, times)
    whole_s, wait_s = times.seconds(load), WAIT * (fixed + token * newcomer)
    part_s = fixed + token * (rows + num_prompt) / num
    assert num * part_s <= (1 + PRICE) * whole_s + 1e-9
    longer_by = (num + 1) * fixed + token * (rows + num_prompt) - (1 + PRICE) * whole_s
    is_finest = num == max(rows, num_prompt)
    assert part_s <= wait_s + 1e-9 or longer_by > -1e-9 or is_finest
    assert num == 1 or fixed + token * (rows + num_prompt) / (num - 1) > wait_s - 1e-9, "no more than it takes"
