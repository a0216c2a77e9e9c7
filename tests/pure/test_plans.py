"""Plans are frozen when they are launched, carry what is new alone, and any number of them may be in flight."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from engine.core.scheduling.scheduler import Scheduler
from engine.core.step import StepPlan
from engine.core.types import AbortCause, BeamParams, Request, SamplingParams
from loadtest.fake_runner import FakeRunner
from tests.pure.driver import EOS, FAILS, Driver, config, request

DEPTHS = (0, 1, 2, 3)


def requests(seed: int) -> Iterator[Request]:
    """Requests that fork, search, fail, share prefixes and are preempted."""
    draw = Random(seed)
    for number in range(10):
        n = draw.randint(1, 3)
        yield request(
            str(number),
            (*range(draw.randint(0, 12)), *(draw.randrange(50) for _ in range(draw.randint(1, 6)))),
            n=n,
            beam=BeamParams(width=n + 1) if draw.random() < 0.2 else None,
            max_tokens=draw.randint(1, 14),
            temperature=draw.choice((0.0, 1.0)),
            eos_token_ids=draw.choice((frozenset(), frozenset([EOS]))),
            top_k=draw.choice((0, 0, 0, FAILS)),
            prompt_logprobs=draw.choice((None, None, 2)),
            seed=number,
        )


def parts(value: Any) -> Iterator[Any]:
    """All that a plan refers to, in any depth, but parameters, which are the request's."""
    yield value
    if isinstance(value, tuple):
        for each in value:
            yield from parts(each)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("windows", [(), (5,), (2, 9)], ids=str)
def test_histories_are_the_same_at_any_depth(depth: int, windows: tuple[int, ...]) -> None:
    """Through preemption, swapping, aborts and rollbacks; no plan changes after its launch, not even after its commit."""
    for seed in range(5):
        draw = Random(f"{depth} {windows} {seed}")
        sizes = {"num_blocks": 26 * (1 + len(windows)), "num_host_blocks": draw.choice((0, 20)), "max_num_seqs": 5}
        driver = Driver(config(windows=windows, **sizes), depth)  # type: ignore[arg-type]
        noted: list[tuple[StepPlan, bytes]] = []
        plan = driver.scheduler.plan

        def note(now: float, plan: Any = plan, noted: Any = noted) -> StepPlan | None:
            made: StepPlan | None = plan(now)
            if made is not None:
                noted.append((made, pickle.dumps(made)))
            return made

        driver.scheduler.plan = note  # type: ignore[method-assign]
        aborted: set[str] = set()
        for asked in requests(seed):
            driver.add(asked)
            for _ in range(draw.randint(0, 4)):
                driver.step()
            if draw.random() < 0.1:
                aborted |= driver.run_out_of_memory(draw.choice((None, "no memory")))
            if draw.random() < 0.1:
                aborted.add(asked.request_id)
                driver.take(driver.scheduler.abort(asked.request_id, AbortCause.DISCONNECT, driver.now))
        driver.drain()
        driver.check_streams(aborted)
        assert all(pickle.dumps(made) == written for made, written in noted)
        kinds = {type(part) for made, _ in noted for part in parts(made)}
        assert {kind for kind in kinds if not issubclass(kind, tuple)} <= {int, bytes, SamplingParams}


def decoding(num_prompt: int, num_seqs: int = 4, windows: tuple[int, ...] = ()) -> tuple[Scheduler, FakeRunner]:
    """Sequences that decode after a prompt of so many tokens."""
    sizes = {"max_model_len": num_prompt + 300, "max_num_batched_tokens": num_seqs * num_prompt}
    blocks = num_seqs * (num_prompt // 16 + 40) * (1 + len(windows))
    settings = config(num_blocks=blocks, block_size=16, windows=windows, **sizes)  # type: ignore[arg-type]
    scheduler, runner = Scheduler(settings), FakeRunner(settings, memory=False)
    for number in range(num_seqs):
        prompt = tuple((number * 7919 + at) % 512 for at in range(num_prompt))
        scheduler.add(request(str(number), prompt, max_tokens=200, eos_token_ids=frozenset()))
    for _ in range(20):
        turn(scheduler, runner)
    return scheduler, runner


def turn(scheduler: Scheduler, runner: FakeRunner) -> StepPlan:
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.commit(plan, runner.run(plan).wait(), 0.0)
    return plan


@pytest.mark.parametrize("windows", [(), (40, 100)], ids=str)
def test_a_decode_step_carries_and_runs_the_same_after_any_context(windows: tuple[int, ...]) -> None:
    """Sizes of plans and executed lines do not depend on how long sequences are."""
    found = []
    for num_prompt in (128, 128 * 32):
        scheduler, runner = decoding(num_prompt, windows=windows)
        lines = 0

        def count(frame: Any, event: str, _: Any) -> Any:
            nonlocal lines
            lines += event == "line"
            return count

        sys.settrace(count)
        try:
            sizes = [len(turn(scheduler, runner).numbers()) for _ in range(32)]
        finally:
            sys.settrace(None)
        found.append((sizes, lines))
    assert found[0] == found[1]
