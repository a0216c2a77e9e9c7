"""No head-of-line blocking: what a long prompt may do to others, and others to it, where steps cost exactly what is said."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.fake_runner import FakeRunner
from engine.core.pacing import ALONE, SHARE
from engine.core.plan import StepPlan
from engine.core.prompts import RESERVE
from tests.pure.driver import VOCAB, Driver, config, request

FIXED_S, TOKEN_S, CONTEXT_S = 4e-3, 0.25e-3, 0.1e-6  # about SmolLM2-135M on two cores
STREAMS = 4


def seconds(plan: StepPlan) -> float:
    """Linear, so that the model can be exact."""
    context = sum(piece.num_tokens * (piece.start + piece.num_tokens / 2) for piece in plan.slices)
    return FIXED_S + TOKEN_S * plan.num_tokens + CONTEXT_S * context


class World:
    """Streams that run for ever, in an engine that has seen enough to know what its steps take."""

    def __init__(self, num_streams: int = STREAMS, **changes: int) -> None:
        sizes = {"num_blocks": 4000, "block_size": 16, "max_model_len": 40_000, "max_num_seqs": 64}
        settings = config(**sizes | {"max_num_batched_tokens": 512, "enable_prefix_caching": False} | changes)
        self.driver = Driver(settings, cost=seconds)
        self.driver.runner = FakeRunner(settings, vocab_size=VOCAB, memory=False)
        for index in range(12):
            self.add(f"warm{index}", 40 * index + 10, max_tokens=3)
            self.run(3)
        self.driver.drain()
        for index in range(num_streams):
            self.add(f"stream{index}", 50, max_tokens=30_000)
        self.run(4)

    def add(self, name: str, num_prompt: int, max_tokens: int = 2) -> None:
        asked = request(name, (1,) * num_prompt, max_tokens=max_tokens, eos_token_ids=frozenset())
        self.driver.add(asked)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.driver.step()

    def until(self, *names: str, max_steps: int = 20_000) -> list[float]:
        """Run until these have their first tokens; the seconds of each step."""
        taken = []
        while not all((name, 0) in self.driver.streams for name in names):
            before = self.driver.now
            self.driver.step()
            taken.append(self.driver.now - before)
            assert len(taken) < max_steps, "starved"
        return taken


def decode_s(num_streams: int, context: int) -> float:
    return FIXED_S + num_streams * (TOKEN_S + CONTEXT_S * context)


def test_a_long_prompt_is_hardly_felt_by_those_who_run() -> None:
    world = World()
    world.add("long", 8000)
    taken = world.until("long")
    work_s = 8000 * (TOKEN_S + CONTEXT_S * 4000)
    assert max(taken) <= 1.01 * (1 + SHARE) * decode_s(STREAMS, 50 + len(taken))
    assert sum(taken) <= 1.2 * work_s * (1 + SHARE) / SHARE, "it takes what it may, in whole tokens"


def test_a_short_request_is_hardly_held_up_by_a_long_prompt() -> None:
    world = World()
    world.add("before", 100)
    alone_s = sum(world.until("before"))
    world.add("long", 8000)
    world.run(40)
    world.add("behind", 100)
    assert sum(world.until("behind")) <= 1.5 * alone_s
    assert ("long", 0) not in world.driver.streams


def test_of_two_long_prompts_the_shorter_need_not_wait_for_the_other() -> None:
    world = World()
    world.add("longer", 8000)
    world.run(5)
    world.add("shorter", 600)
    world.until("shorter")
    assert ("longer", 0) not in world.driver.streams
    world.until("longer")


def test_a_crowd_of_long_prompts_soon_has_the_step() -> None:
    world = World()
    for index in range(6):
        world.add(f"long{index}", 2000)
    taken = world.until("long0")
    assert max(taken) > 5 * decode_s(STREAMS, 100)
    assert world.driver.scheduler.stats.step_tokens.sum / world.driver.scheduler.stats.steps < 512


def test_whoever_comes_while_a_long_prompt_is_alone_waits_for_no_long_step() -> None:
    world = World(num_streams=0)
    world.add("long", 8000)
    taken = world.until("long")
    assert max(taken) <= (ALONE + 1) * FIXED_S * 1.01
    assert sum(taken) <= 1.15 * (8000 * TOKEN_S + 8000**2 / 2 * CONTEXT_S), "and that costs an eighth"


def test_short_prompts_are_computed_whole() -> None:
    world = World()
    world.add("long", 8000)
    for index in range(3):
        world.add(f"short{index}", 100)
    assert len(world.until("short0", "short1", "short2")) == 1


def test_an_engine_that_has_seen_nothing_holds_nothing_back() -> None:
    driver = Driver(config(num_blocks=400, max_model_len=2000, max_num_batched_tokens=100), cost=seconds)
    driver.add(request("long", (1,) * 300))
    plan = driver.scheduler.plan(0.0)
    assert plan is not None
    assert plan.num_tokens == 100


@settings(max_examples=20, deadline=None)
@given(
    num_streams=st.integers(0, 12),
    num_prompt=st.integers(200, 3000),
    shorts=st.lists(st.integers(1, 100), max_size=20),
    others=st.lists(st.integers(200, 3000), max_size=4),
)
def test_no_starvation_bound(num_streams: int, num_prompt: int, shorts: list[int], others: list[int]) -> None:
    """Whoever is first in line has at least a share of all time, however many short or long prompts come after it.

    With n in line its part of a step is at least s = SHARE * n * n / 2 (n = 1: SHARE) of the rest, hence s / (1 + 2 s) of all,
    which is least for n = 1; rounding down to whole tokens, at least one, costs it half at worst; and where the step is full, it
    has 1 / RESERVE of its tokens.
    """
    world = World(num_streams)
    world.add("first", num_prompt)
    world.run(1)
    for index, length in enumerate(others):
        world.add(f"other{index}", length)
    begun, crowd, num_steps = world.driver.now, iter(shorts * 200), 0
    while ("first", 0) not in world.driver.streams:
        world.add(f"short{num_steps}", next(crowd, 50), max_tokens=1)
        world.driver.step()
        num_steps += 1
    work_s = num_prompt * (TOKEN_S + CONTEXT_S * num_prompt / 2)
    share = min(SHARE / (1 + SHARE) / 2, 1 / RESERVE)
    assert world.driver.now - begun <= work_s / share + 2 * seconds_of_a_full_step(world)


def seconds_of_a_full_step(world: World) -> float:
    return FIXED_S + world.driver.scheduler.config.max_num_batched_tokens * (TOKEN_S + CONTEXT_S * 3000)


@pytest.mark.parametrize("budget", [7, 8, 64])
def test_long_prompts_are_computed_right(budget: int) -> None:
    driver = Driver(config(num_blocks=100, max_model_len=90, max_num_batched_tokens=budget), cost=seconds)
    for index in range(12):
        driver.add(request(str(index), tuple(range(index, index + 5 + 7 * index % 60)), n=1 + index % 2, seed=index))
        driver.step()
    driver.drain()
    driver.check_streams()
