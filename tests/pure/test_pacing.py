"""No head-of-line blocking: what a long prompt may do to others, and others to it, where steps cost exactly what is said."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.budget import AIM, ALONE, FLOOR, MOST_S, RESERVE, SHARE, Load
from engine.core.spans import Span, count_vectors
from engine.core.stats import Target
from engine.core.step import StepPlan
from tests.pure.driver import Driver, config, request
from tests.pure.world import CONTEXT_S, FIXED_S, STREAMS, TOKEN_S, World, decode_s, seconds


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


def test_the_prompt_of_an_image_has_the_share_of_a_tower() -> None:
    """A vector that costs as much as four ids does not make it a token a step."""
    num_steps = {}
    for name, vector_s in (("text", 0.0), ("cheap", 0.0), ("dear", 3 * TOKEN_S)):
        more_s = [0.0]  # of each token of a prompt

        def cost(plan: StepPlan, more_s: list[float] = more_s) -> float:
            return seconds(plan) + more_s[0] * sum(chunk.num_tokens for chunk in plan.chunks)

        world = World(8, cost=cost)
        world.add("before", 2000)
        world.until("before")
        more_s[0] = vector_s
        world.add("long", 2000, spans=() if name == "text" else (Span(0, 2000, b"a"),))
        num_steps[name] = len(taken := world.until("long"))
        assert name == "text" or max(taken[5:]) <= 2 * decode_s(8, 200), taken
    assert num_steps["cheap"] < 0.7 * num_steps["text"]
    assert num_steps["dear"] < 6 * num_steps["cheap"]


def test_short_prompts_are_computed_whole() -> None:
    world = World()
    world.add("long", 8000)
    for index in range(3):
        world.add(f"short{index}", 100)
    assert len(world.until("short0", "short1", "short2")) == 1


def test_short_prompts_hold_up_streams_for_a_second_together() -> None:
    slow = 200
    world = World(cost=lambda plan: slow * seconds(plan))
    names = [f"short{index}" for index in range(20)]
    for name in names:
        world.add(name, 200, max_tokens=1)
    taken = world.until(*names)
    decodes_s = slow * decode_s(STREAMS, 50 + len(taken))
    assert max(taken) <= 1.02 * (MOST_S + decodes_s) + slow * (FIXED_S + TOKEN_S)
    work_s = 20 * 200 * slow * (TOKEN_S + CONTEXT_S * 100)
    assert sum(taken) <= 1.1 * work_s * (1 + decodes_s / MOST_S), "each takes what it may"


def test_an_engine_that_has_seen_nothing_holds_nothing_back() -> None:
    driver = Driver(config(num_blocks=400, max_model_len=2000, max_num_batched_tokens=100), cost=seconds)
    driver.add(request("long", (1,) * 300))
    plan = driver.scheduler.plan(0.0)
    assert plan is not None
    assert plan.num_tokens == 100


@settings(max_examples=20)
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


@pytest.mark.parametrize("target_s", [0.010, 0.030, 0.080])
def test_no_step_outlasts_a_target_itl(target_s: float) -> None:
    world = World(target_itl_s=target_s)
    world.add("long", 6000)
    world.run(3)
    for index in range(30):
        world.add(f"short{index}", 300, max_tokens=1)
    taken = world.until("long", *(f"short{index}" for index in range(30)))
    rounding_s = TOKEN_S + CONTEXT_S * 6000
    assert max(taken) <= 1.02 * AIM * target_s + rounding_s
    work_s = 6000 * (TOKEN_S + CONTEXT_S * 3000) + 30 * 300 * (TOKEN_S + CONTEXT_S * 150)
    share = 1 - decode_s(STREAMS, 50 + len(taken)) / (AIM * target_s)
    assert sum(taken) <= 1.2 * work_s / share, "all that it leaves is used"


def test_a_target_itl_that_decoding_alone_misses_starves_nobody() -> None:
    world = World(target_itl_s=0.001)
    world.add("long", 1000)
    for index in range(5):
        world.add(f"short{index}", 100)
    taken = world.until("long", *(f"short{index}" for index in range(5)))
    assert max(taken) <= (1 + FLOOR) * decode_s(STREAMS + 6, 1000) + 2 * TOKEN_S


def test_beside_an_unattainable_target_itl_prompts_have_a_tenth_of_the_time() -> None:
    world = World(20, target_itl_s=0.001)
    world.add("long", 100)
    num_tokens = FLOOR * decode_s(20, 50) // TOKEN_S
    assert num_tokens == 3, "the least without that share is one"
    assert len(world.until("long")) <= (20 * 50 + 100) / (num_tokens - 0.5)


def test_a_generous_target_itl_lets_prompts_go_faster_than_without() -> None:
    taken = []
    for target_s in (None, 0.1):
        world = World(target_itl_s=target_s)
        world.add("long", 8000)
        taken.append(sum(world.until("long")))
    assert taken[1] < taken[0] / 2


def test_a_long_prompt_is_hurried_to_keep_a_target_ttft() -> None:
    kept = {}
    for target_s in (None, 9.0, 4.0):
        world = World(target_ttft_s=target_s)
        world.add("long", 8000)
        kept[target_s] = sum(world.until("long"))
    assert kept[None] > 12
    assert 8 * AIM < kept[9.0] <= 9
    assert kept[4.0] == pytest.approx(kept[None], rel=0.05), "what cannot be kept is not paid for"


def test_goodput_counts_what_met_its_targets() -> None:
    world = World(num_streams=0, target_itl_s=0.05, target_ttft_s=0.2)
    stats = world.driver.scheduler.stats
    before = stats.targeted, stats.met
    world.add("good", 100, max_tokens=5)
    world.driver.drain()
    world.add("late", 8000, max_tokens=5)
    world.driver.drain()
    assert (stats.targeted - before[0], stats.met - before[1]) == (2, 1)
    assert stats.missed[Target.TTFT] == 1
    assert stats.missed[Target.ITL] == stats.missed[Target.DEADLINE] == 0


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


@pytest.mark.parametrize("kind", ["states", "vectors"])
@pytest.mark.parametrize("is_known", [True, False])
def test_the_target_holds_though_chunks_have_states_and_prompts_have_vectors(
    kind: str, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk's state costs as much as 12 tokens, a vector as 8 ids; a model of the step without them misses the target."""
    spans_of: dict[int, tuple[Span, ...]] = {}
    target_s, has_states = 0.03, kind == "states"

    def cost(plan: StepPlan) -> float:
        spans_of.update({row.slot: row.spans for row in plan.rows})
        num_vectors = sum(count_vectors(spans_of[slot], at, at + num) for slot, at, num, *_ in plan.chunks)
        return seconds(plan) + 12 * TOKEN_S * len(plan.chunks) * has_states + 8 * TOKEN_S * num_vectors

    if not is_known:
        with_chunk = Load.with_chunk
        monkeypatch.setattr(Load, "with_chunk", lambda self, start, count, **_: with_chunk(self, start, count))
    world = World(cost=cost, state_blocks=int(has_states), target_itl_s=target_s)
    for turn in range(40):
        world.add(f"long{turn}", 300)
        world.add(f"few{turn}", 40, spans=() if has_states else (Span(10, 20, b"a" * 32),))
        world.run(8)
    world.run(30)
    for index in range(40):
        spans = () if has_states else (Span(2, 60, b"b" * 32),)
        world.add(f"late{index}", 4 if has_states else 64, spans=spans)
    taken = world.until(*[f"late{index}" for index in range(40)])
    assert (max(taken) <= target_s * 1.02) == is_known, max(taken)
