"""Prompts with spans of vectors: names of blocks, atomic spans in steps, lowered limits and background work."""

from __future__ import annotations

from contextlib import suppress
from hashlib import sha256
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from engine.core.errors import NeverFitsError
from engine.core.kv.prefix_cache import name_block, request_names
from engine.core.spans import Span
from engine.core.types import Request
from loadtest.fake_runner import CostModel
from tests.pure.driver import Driver, config, request
from tests.pure.test_scheduler_properties import SchedulerMachine
from tests.pure.world import World

END = frozenset[int]()
IMAGE = 49  # the id that stands where vectors are


def digest(content: int) -> bytes:
    return sha256(b"%d" % content).digest()


def prompt_of(*parts: int | tuple[int, int, bool]) -> dict[str, object]:
    """A prompt of so many ids, and of spans: their length, their content, and whether they are atomic."""
    tokens: list[int] = []
    spans: list[Span] = []
    for part in parts:
        if isinstance(part, int):
            tokens += range(len(tokens), len(tokens) + part)
        else:
            spans.append(Span(len(tokens), part[0], digest(part[1]), part[2]))
            tokens += [IMAGE] * part[0]
    return {"prompt": tuple(token % 50 for token in tokens), "spans": tuple(spans)}


def asked(name: str, *parts: int | tuple[int, int, bool], **changes: object) -> Request:
    return request(name, **(prompt_of(*parts) | {"max_tokens": 4, "eos_token_ids": END} | changes))  # type: ignore[arg-type]


class SpanMachine(SchedulerMachine):
    """The histories of test_scheduler_properties.py, rollbacks included, of prompts with spans, and groups of all kinds."""

    @initialize(
        depth=st.integers(0, 2),
        windows=st.lists(st.sampled_from([1, 4, 9]), max_size=1),
        state_blocks=st.sampled_from([0, 0, 1, 2]),
        num_blocks=st.integers(14, 60),
        budget=st.integers(6, 24),
        caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "fair", "priority"]),
        num_host_blocks=st.sampled_from([0, 12]),
        target_itl_s=st.sampled_from([None, 0.001]),
        cost=st.sampled_from([None, CostModel(0.001, 0.01, 0.001)]),
        data=st.data(),
    )
    def start(  # type: ignore[override]
        self,
        depth: int,
        windows: list[int],
        budget: int,
        caching: bool,
        cost: CostModel | None,
        data: st.DataObject,
        **changes: str | float | None,
    ) -> None:
        sizes = {"max_num_batched_tokens": budget, "enable_prefix_caching": caching, "max_model_len": 40}
        settings_ = config(windows=tuple(windows), **sizes, **changes)  # type: ignore[arg-type]
        self.driver = Driver(settings_, depth, cost and cost.seconds)
        self.aborted: set[str] = set()
        add = self.driver.add

        def with_spans(plain: Request) -> None:
            """Put spans where the prompt has ids."""
            start, spans = data.draw(st.integers(0, 6)), list[Span]()
            while start < len(plain.prompt) and len(spans) < 3:
                length = data.draw(st.integers(1, len(plain.prompt) - start))
                spans.append(Span(start, length, digest(data.draw(st.integers(0, 1))), data.draw(st.booleans())))
                start += length + data.draw(st.integers(0, 5))
            with suppress(NeverFitsError):
                add(Request(**{name: getattr(plain, name) for name in plain.__slots__} | {"spans": tuple(spans)}))

        self.driver.add = with_spans  # type: ignore[method-assign]

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "driver"):
            assert not self.driver.scheduler._queue.num_with_spans


SpanMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestSpanMachine = SpanMachine.TestCase


def names(made: Request) -> list[bytes]:
    """The names of a prompt's blocks of 4."""
    chain = request_names(made, config())
    return [name_block(chain, made.prompt, index, 4) for index in range(len(made.prompt) // 4)]


def num_common(*parts: tuple[int | tuple[int, int, bool], ...]) -> int:
    """How many blocks two prompts have in common."""
    first, second = (names(asked("r", *each)) for each in parts)
    return next(
        (index for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first)
    )


def test_a_name_takes_the_digest_of_the_span_that_its_block_covers() -> None:
    assert num_common((6, (8, 1, True), 6), (6, (8, 1, True), 6)) == 5
    assert num_common((6, (8, 1, True), 6), (6, (8, 2, True), 6)) == 1, "other vectors"
    assert num_common((4, (8, 1, True), 8), (4, (9, 1, True), 7)) == 3, "as far as the longer one is the same"


def test_a_name_takes_the_offset_in_the_span() -> None:
    """Two halves of an image are not the same, though both blocks hold the same placeholder ids."""
    whole = names(asked("r", (8, 1, False)))
    spans = (Span(0, 4, digest(1)), Span(4, 4, digest(1)))
    halves = names(request("r", (IMAGE,) * 8, spans=spans))
    assert whole[0] == halves[0]
    assert whole[1] != halves[1]
    tails = [names(request("r", (IMAGE,) * 4, spans=(Span(at, 3, digest(1)),))) for at in (0, 1)]
    assert tails[0] != tails[1], "nor is the same span in another place of a block"


def test_a_block_that_an_answer_completes_takes_the_digest_too() -> None:
    """The prompt ends within a block that a span covers."""
    driver = Driver(config(num_blocks=60))
    said = []
    for content in (1, 2):
        driver.add(asked(f"{len(said)}", 6, (8, content, True), max_tokens=12))
        driver.drain()
        said.append(driver.streams[f"{len(said)}", 0])
    assert said[0] != said[1]
    assert driver.prompts["1", 0].num_cached_tokens == 4
    for content, expected in ((1, 24), (2, 12)):
        turn = (*prompt_of(6, (8, 1, True))["prompt"], *said[0])  # type: ignore[misc]
        spans = (Span(6, 8, digest(content), is_atomic=True),)
        driver.add(request(f"turn {content}", turn, spans=spans, max_tokens=2, eos_token_ids=END))
        driver.drain()
        assert driver.prompts[f"turn {content}", 0].num_cached_tokens == expected
    driver.check_streams()


def chunks(driver: Driver, name: str) -> list[tuple[int, int]]:
    """The first and last position of each chunk of a request's prompt, until it has its first token."""
    found: list[tuple[int, int]] = []
    launch, run = driver.launch, driver.runner.run

    def note(plan: object) -> object:
        step = driver.scheduler._in_flight[-1]
        for start, length, seq in zip(*zip(*plan.spans, strict=True), step.sequences, strict=True):  # type: ignore[attr-defined]
            if seq.request_id == name and start < seq.num_prompt:
                found.append((start, start + length))
        return run(plan)  # type: ignore[arg-type]

    driver.runner.run = note  # type: ignore[assignment, method-assign]
    while (name, 0) not in driver.streams:
        driver.step()
    driver.runner.run = run  # type: ignore[method-assign]
    assert launch == driver.launch
    return found


def test_a_step_takes_an_atomic_span_whole() -> None:
    driver = Driver(config(max_num_batched_tokens=12, num_blocks=60))
    driver.add(asked("a", 8, (10, 1, True), 3, (12, 2, True)))
    assert chunks(driver, "a") == [(0, 8), (8, 20), (20, 21), (21, 33)]
    driver.drain()
    driver.check_streams()


def test_the_first_step_that_has_room_takes_it_beyond_its_pace() -> None:
    world = World(target_itl_s=0.002)  # a step of the streams alone takes longer
    world.add("long", 2000, spans=(Span(700, 300, digest(1), is_atomic=True),))
    found = chunks(world.driver, "long")
    assert any(stop - start >= 300 and start <= 700 and stop >= 1000 for start, stop in found)
    assert len([stop for _, stop in found if stop <= 700]) > 3, "the rest is paced"


def test_decodes_wait_a_step_for_a_span_that_fills_one_but_not_two_in_turn() -> None:
    driver = Driver(config(max_num_batched_tokens=8, num_blocks=80))
    for index in range(4):
        driver.add(request(f"{index}", (index, 1), max_tokens=40, eos_token_ids=END))
    for _ in range(4):
        driver.step()
    driver.add(asked("a", (8, 1, True), (8, 2, True), (8, 3, True)))
    before = {key: len(said) for key, said in driver.streams.items()}
    found = chunks(driver, "a")
    assert found == [(0, 8), (8, 16), (16, 24)]
    assert all(2 <= len(said) - before[key] < 12 for key, said in driver.streams.items() if key in before)
    driver.drain()
    driver.check_streams()


def test_one_that_fills_a_step_leaves_nothing_of_it_for_long_prompts() -> None:
    driver = Driver(config(max_num_batched_tokens=8, num_blocks=80))
    driver.add(request("long", tuple(range(40)), max_tokens=1, eos_token_ids=END))
    driver.step()
    driver.add(asked("image", (8, 1, True)))
    assert chunks(driver, "image") == [(0, 8)]  # the driver compares every step with the budget
    driver.drain()
    driver.check_streams()


@pytest.mark.parametrize("seed", [721, 853, 941])
def test_a_window_has_room_for_all_of_an_atomic_span(seed: int) -> None:
    """Histories in which one of the prompts would be preempted if each was promised its window alone."""
    draw = Random(seed)
    driver = Driver(config(windows=(4,), num_blocks=draw.randint(16, 30), max_num_batched_tokens=24))  # type: ignore[arg-type]
    for index in range(draw.randint(2, 5)):
        if draw.random() < 0.4:
            prompt = tuple(range(draw.randint(1, 20)))
            driver.add(request(f"{index}", prompt, max_tokens=draw.randint(1, 20), eos_token_ids=END))
        else:
            driver.add(asked(f"{index}", draw.randint(1, 6), (draw.randint(10, 22), index, True), 2, max_tokens=2))
        for _ in range(draw.randint(0, 3)):
            driver.step()
    driver.drain()
    assert not sum(driver.scheduler.stats.preempted.values())
    driver.check_streams()


def test_one_that_no_step_holds_is_refused() -> None:
    driver = Driver(config(max_num_batched_tokens=12, num_blocks=60))
    driver.add(asked("fits", (12, 1, True)))
    driver.add(asked("divided", (13, 1, False)))
    with pytest.raises(NeverFitsError, match=r"13 tokens that is computed in one step, but a step holds 12"):
        driver.add(asked("refused", 2, (13, 1, True)))
    driver.drain()
    driver.check_streams()


def test_after_out_of_memory_it_is_alone_in_a_step_and_fails_alone() -> None:
    driver = Driver(config(max_num_batched_tokens=20, num_blocks=80))
    for index in range(3):
        driver.add(request(f"{index}", (index, 1), max_tokens=30, eos_token_ids=END))
    for _ in range(3):
        driver.step()
    driver.add(asked("image", (14, 1, True), 1))
    while not any(seq.num_planned for seq in driver.scheduler.running if seq.request_id == "image"):
        driver.launch()
        (plan, _) = driver.launched[-1]
        if any(length >= 14 for _, length in plan.spans):
            break
        driver.commit()
    assert not driver.run_out_of_memory(), "a smaller step is tried"
    driver.launch()
    step = driver.scheduler._in_flight[-1]
    assert [seq.request_id for seq in step.sequences] == ["image"]
    assert driver.launched[-1][0].num_tokens >= 14 > driver.scheduler._budget._limit
    assert driver.run_out_of_memory("no memory") == {"image"}
    driver.drain()
    assert all(len(driver.streams[f"{index}", 0]) == 30 for index in range(3))


def test_background_work_takes_a_span_larger_than_its_steps() -> None:
    driver = Driver(config(max_num_batched_tokens=20, num_blocks=80))
    driver.add(asked("a", 3, (20, 1, True), is_background=True))
    driver.drain()
    driver.check_streams()
