"""A real model on a device that runs out of memory now and then: every answer is the one it gives undisturbed."""

from __future__ import annotations

import queue
import random
from pathlib import Path

import pytest

from engine.core.errors import DeviceMemoryError
from engine.core.step import PendingStep, Runner, StepPlan, StepResult
from engine.core.types import FinishReason, Request, SamplingParams, StepEvents
from engine.loop import Engine
from engine.settings.engine_config import EngineConfig
from engine.startup.build import build_engine
from tests.cpu.test_models_families import CASES, write_tiny
from tests.integrity import check_scheduler
from tests.patience import PATIENCE_S


class _Lost(PendingStep):
    """A step that was computed, and whose result cannot be had."""

    def wait(self) -> StepResult:
        raise DeviceMemoryError("made to fail")


class Forgetful:
    """A runner that fails every few steps, before it computes, after, or at `wait`; a second try always succeeds."""

    def __init__(self, runner: Runner, seed: int, num_good: int = 2) -> None:
        """Of `num_good` + 3 steps 3 fail."""
        self._runner, self._random, self._num_spared = runner, random.Random(seed), 0
        self.num_failed = 0
        self._ways = [""] * num_good + ["before", "after", "wait"]

    def begin(self) -> None:
        self._runner.begin()

    def run(self, plan: StepPlan) -> PendingStep:
        how = "" if self._num_spared else self._random.choice(self._ways)
        # With overlap, another step is launched before the one that fails at `wait` is waited for.
        self._num_spared = {"": max(self._num_spared - 1, 0), "wait": 2}.get(how, 1)
        self.num_failed += bool(how)
        if how == "before":
            raise DeviceMemoryError("made to fail")
        step = self._runner.run(plan)
        if how == "after":
            raise DeviceMemoryError("made to fail")
        return _Lost() if how == "wait" else step

    def use_idle_moment(self) -> bool:
        return self._runner.use_idle_moment()

    def close(self) -> None:
        self._runner.close()


def requests() -> list[Request]:
    """Greedy and drawn, of one and several choices, penalised, scored, with shared prefixes."""
    made = []
    for i in range(14):
        params = SamplingParams(
            max_tokens=6 + i % 5,
            temperature=float(i % 2),
            top_p=0.9,
            seed=i,
            n=1 + i % 3,
            repetition_penalty=1.3 if i % 4 == 1 else 1.0,
            frequency_penalty=0.7 if i % 4 == 2 else 0.0,
            logprobs=2 if i % 5 == 0 else None,
            prompt_logprobs=1 if i % 7 == 3 else None,
        )
        prompt = tuple((3 * j + i // 3) % 128 for j in range(5 + 2 * i))
        made.append(Request(request_id=str(i), prompt=prompt, params=params, arrival_s=float(i)))
    return made


def answers(engine: Engine) -> dict[tuple[str, int], tuple[list[int], FinishReason]]:
    heard: queue.SimpleQueue[StepEvents] = queue.SimpleQueue()
    engine.start(heard.put)
    engine.submit(*requests())
    num_open = sum(request.params.n for request in requests())
    said: dict[tuple[str, int], list[int]] = {}
    ends: dict[tuple[str, int], FinishReason] = {}
    while len(ends) < num_open:
        for event in heard.get(timeout=PATIENCE_S):
            key = event.request_id, event.choice
            said.setdefault(key, []).extend(event.token_ids)
            if event.prompt is not None and event.prompt.logprobs is not None:
                assert len(event.prompt.logprobs) == 5 + 2 * int(event.request_id)
            if event.finish_reason is not None:
                assert event.error is None, event.error
                ends[key] = event.finish_reason
    engine.stop(0.0)
    check_scheduler(engine._scheduler)
    stats = engine.stats
    assert (stats.blocks_held, stats.num_running, stats.num_waiting, stats.integrity_failures) == (0, 0, 0, 0)
    return {key: (said[key], ends[key]) for key in ends}


@pytest.mark.parametrize("depth", [False, True], ids=["depth0", "depth1"])
@pytest.mark.parametrize("seed", range(4))
def test_steps_that_are_taken_back_change_no_answer(depth: bool, seed: int, tmp_path: Path) -> None:
    write_tiny(CASES["qwen3"], tmp_path)
    config = EngineConfig(
        model=str(tmp_path),
        device="cpu",
        dtype="float32",
        num_threads=1,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        kv_cache_memory_bytes=1 << 17,
        async_scheduling=depth,
    )
    expected = answers(build_engine(config, lambda _: None))
    engine = build_engine(config, lambda _: None)
    engine._runner = runner = Forgetful(engine._runner, seed)
    assert answers(engine) == expected
    assert runner.num_failed > 5
    assert engine.stats.out_of_memory_steps > 5
