"""The whole engine on a CUDA device: what it says there is what it says on the CPU."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.arbiter import Arbiter
from engine.core.types import Request, SamplingParams, StepEvents
from engine.loop import Engine
from engine.runtime.pool.batch import DecodeRows
from engine.settings.engine_config import EngineConfig
from engine.startup.build import build_engine
from tests.cpu.test_models_families import CASES, ON_A_GPU, write_tiny
from tests.patience import PATIENCE_S
from tests.reference_attention import reference_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
Wishes = Callable[[Engine, int], dict[str, Any]]
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # which takes a second for a step
NUM_REQUESTS, MAX_SEQS = (3, 4) if IS_INTERPRETED else (8, 8)


def build(folder: Path, device: str, arbiter: Arbiter | None = None, **changes: object) -> Engine:
    fields = {"model": str(folder), "device": device, "dtype": "float32", "max_model_len": 64, "max_num_seqs": MAX_SEQS}
    fields |= {"kv_cache_memory_bytes": 1 << 22} | changes
    config = EngineConfig(**fields)  # type: ignore[arg-type]  # mixed value types
    return build_engine(config, lambda progress: None, arbiter=arbiter)


def asked(engine: Engine, wishes: Wishes = lambda engine, i: {}) -> list[Request]:
    """Greedy and seeded requests, some of two choices, some that edit their logits; `wishes` are more."""
    requests = []
    for i in range(NUM_REQUESTS):
        params = SamplingParams(max_tokens=12, temperature=float(i % 2), seed=i, n=1 + i % 3 // 2, top_p=0.9)
        if i % 4 > 1:
            params = replace(params, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias=((5, 1.5), (9, -100.0)))
        if i % 4 == 1:
            words = ((3,), *((first, second) for first in range(64) for second in range(40, 50)))
            params = replace(params, allowed_token_ids=frozenset(range(100)), bad_words=words)
        params = replace(params, **wishes(engine, i))
        prompt = tuple((7 * i + j) % 128 for j in range(3 + 5 * i))
        requests.append(Request(request_id=str(i), prompt=prompt, params=params, arrival_s=engine.clock()))
    return requests


class Heard:
    """What an engine says to requests that are sent together; it is stopped at the end."""

    def __init__(self, engine: Engine, requests: list[Request]) -> None:
        self._engine, self._events = engine, queue.SimpleQueue[StepEvents]()
        self._num_open = sum(request.params.n for request in requests)
        engine.start(self._events.put)
        engine.submit(*requests)

    def wait(self) -> dict[tuple[str, int], list[int]]:
        said: dict[tuple[str, int], list[int]] = {}
        while self._num_open:
            for event in self._events.get(timeout=PATIENCE_S):
                said.setdefault((event.request_id, event.choice), []).extend(event.token_ids)
                self._num_open -= event.finish_reason is not None
                assert event.error is None
        self._engine.stop(0.0)
        return said


def answers(engine: Engine, wishes: Wishes = lambda engine, i: {}) -> dict[tuple[str, int], list[int]]:
    """What an engine says to all requests together."""
    return Heard(engine, asked(engine, wishes)).wait()


@pytest.mark.parametrize("depth", [False, True], ids=["depth0", "depth1"])
@pytest.mark.parametrize("name", ON_A_GPU)
def test_cuda_says_what_the_cpu_says(name: str, depth: bool, tmp_path: Path) -> None:
    write_tiny(CASES[name], tmp_path)
    expected = answers(build(tmp_path, "cpu"))
    assert answers(build(tmp_path, "cuda", async_scheduling=depth)) == expected
    tight = build(tmp_path, "cuda", async_scheduling=depth, max_num_batched_tokens=16)
    assert answers(tight) == expected


@pytest.mark.parametrize("name", ON_A_GPU)
def test_the_kernels_say_what_the_reference_says(name: str, tmp_path: Path) -> None:
    write_tiny(CASES[name], tmp_path)
    with reference_attention():
        expected = answers(build(tmp_path, "cuda", attention_backend="torch"))
    assert answers(build(tmp_path, "cuda")) == expected


@pytest.mark.parametrize("depth", [False, True], ids=["depth0", "depth1"])
def test_graphs_say_what_single_launches_say(depth: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.runtime.execution.decode_graphs import (  # Triton's, which must not be there for other tests
        DecodeGraphs,
        Outputs,
    )

    write_tiny(CASES["qwen3"], tmp_path)
    launched, launch = [], DecodeGraphs.launch

    def counting(self: DecodeGraphs, rows: DecodeRows) -> Outputs:
        launched.append(rows.fields.shape[1])
        return launch(self, rows)

    monkeypatch.setattr(DecodeGraphs, "launch", counting)
    wishes = {"max_tokens": 3} if IS_INTERPRETED else {}
    eager = answers(build(tmp_path, "cuda", async_scheduling=depth, enforce_eager=True), lambda engine, i: wishes)
    assert not launched
    assert answers(build(tmp_path, "cuda", async_scheduling=depth), lambda engine, i: wishes) == eager
    assert launched


@pytest.mark.parametrize("depth", [False, True], ids=["depth0", "depth1"])
def test_preempted_requests_say_the_same(depth: bool, tmp_path: Path) -> None:
    write_tiny(CASES["qwen3"], tmp_path)
    expected = answers(build(tmp_path, "cpu"))
    crowded = build(tmp_path, "cuda", async_scheduling=depth, block_size=4, kv_cache_memory_bytes=96 << 10)
    assert crowded.config.num_blocks == 16  # one of the longest contexts, for nine sequences
    assert answers(crowded) == expected
    assert crowded.stats.preemptions > 0
