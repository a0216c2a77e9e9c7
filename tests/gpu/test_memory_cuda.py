"""Memory of the CUDA engine: the share is kept, a card that is too small is told, and a step that does not fit is survived."""

from __future__ import annotations

import gc
import json
import queue
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.core.errors import MemoryBudgetError
from engine.core.types import FinishReason, Progress, Request, SamplingParams, StepEvents, TokenEvent
from engine.loop import Engine
from engine.settings.engine_config import EngineConfig
from engine.startup.build import build_engine
from tests.integrity import check_scheduler
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
NUM_POSITIONS = 1 << 21  # at 64 KiB a token, 128 GiB: more than the shares below are of any card


@pytest.fixture(autouse=True)
def _whole_card() -> Iterator[None]:
    """Each test finds the card as the one before it did."""
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A config.json alone, which is all that dummy weights need: few of them, and much K/V a token."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": NUM_POSITIONS,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def build(folder: str, report: list[Progress] | None = None, **changes: object) -> Engine:
    fields = {
        "model": folder,
        "load_format": "dummy",
        "dtype": "float32",
        "device": "cuda",
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
    } | changes
    told: list[Progress] = [] if report is None else report
    return build_engine(EngineConfig(**fields), told.append)  # type: ignore[arg-type]  # mixed value types


def refusal(folder: str, **changes: object) -> str:
    """What is said instead of building; nothing of what was begun stays on the card."""
    try:
        build(folder, **changes)
    except MemoryBudgetError as error:
        told = str(error)
    gc.collect()
    torch.cuda.empty_cache()
    return told


class Client:
    """Asks an engine and hears it out."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.events: queue.SimpleQueue[StepEvents] = queue.SimpleQueue()
        engine.start(self.events.put)

    def ask(self, *lengths: int) -> list[tuple[list[int], TokenEvent]]:
        """The answers to greedy requests with prompts of these lengths: their tokens and their ends."""
        prompts = [tuple((7 * j + length) % 1000 for j in range(length)) for length in lengths]
        params = SamplingParams(max_tokens=8, temperature=0.0)
        names = [f"{id(prompt)}" for prompt in prompts]
        self.engine.submit(
            *[
                Request(request_id=name, prompt=prompt, params=params, arrival_s=self.engine.clock())
                for name, prompt in zip(names, prompts, strict=True)
            ]
        )
        said: dict[str, list[int]] = {name: [] for name in names}
        ends: dict[str, TokenEvent] = {}
        while len(ends) < len(names):
            for event in self.events.get(timeout=PATIENCE_S):
                said[event.request_id] += event.token_ids
                if event.finish_reason is not None:
                    ends[event.request_id] = event
        return [(said[name], ends[name]) for name in names]


def used_share() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / total


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_the_share_is_kept_within_a_percent(share: float, folder: str) -> None:
    report: list[Progress] = []
    engine = build(folder, report, gpu_memory_utilization=share)
    told = [progress.detail for progress in report if progress.stage == "memory"]
    assert abs(used_share() - share) <= 0.01, told
    Client(engine).ask(*range(16, 144), 5000)
    assert abs(used_share() - share) <= 0.01, told
    engine.stop(0.0)
    assert engine.stats.out_of_memory_steps == 0


def test_too_small_a_share_names_the_length_that_then_works(folder: str) -> None:
    told = refusal(folder, gpu_memory_utilization=0.2, max_model_len=NUM_POSITIONS)
    assert re.search(r"of [\d.]+ GiB, [\d.]+ may be used: weights [\d.]+, a full step [\d.]+, CUDA graphs", told), told
    named = int(re.findall(r"set it to at most (\d+)", told)[0])
    # Less a thousandth, since torch's segments of 2 MiB need not fall alike twice.
    engine = build(folder, gpu_memory_utilization=0.2, max_model_len=named - named // 1000)
    ((tokens, end),) = Client(engine).ask(100)
    assert (len(tokens), end.finish_reason) == (8, FinishReason.LENGTH)
    engine.stop(0.0)


def test_auto_lowers_the_length_to_what_fits_and_says_so(folder: str) -> None:
    report: list[Progress] = []
    engine = build(folder, report, gpu_memory_utilization=0.2, max_model_len=None)
    config = engine.config
    assert config.max_model_len == config.num_blocks * config.block_size < NUM_POSITIONS
    assert any("--max-model-len auto" in progress.detail for progress in report if progress.stage == "kv_pool")


def test_a_share_that_the_weights_alone_exceed_is_refused_with_the_numbers(folder: str) -> None:
    told = refusal(folder, gpu_memory_utilization=0.0001)
    assert re.search(
        r"The KV pool may use 0\.0 MiB \(of [\d.]+ GiB, 0\.0\d may be used: weights .*raise --gpu-mem", told
    ), told


def test_a_pool_that_leaves_no_step_is_refused(folder: str) -> None:
    free, _ = torch.cuda.mem_get_info()
    told = refusal(folder, kv_cache_memory_bytes=free - (1 << 29), max_num_batched_tokens=1 << 16)
    assert "lower --kv-cache-memory-bytes" in told


@pytest.mark.parametrize("depth", [False, True], ids=["depth0", "depth1"])
def test_a_card_that_fills_up_ends_requests_and_not_the_engine(depth: bool, folder: str) -> None:
    """Another tenant takes the rest of the card; once it has gone, all is served again."""
    engine = build(folder, kv_cache_memory_bytes=1 << 30, async_scheduling=depth, enable_prefix_caching=False)
    client = Client(engine)
    (before,) = client.ask(20)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1])
    ends = [end for _, end in client.ask(*range(1000, 1020))]
    assert all(end.error is None or end.error.code == "ComputeError" for end in ends)
    assert engine.stats.out_of_memory_steps > 0
    assert engine.health().alive
    torch.cuda.set_per_process_memory_fraction(1.0)
    (after,) = client.ask(20)
    assert after[0] == before[0]
    engine.stop(0.0)
    check_scheduler(engine._scheduler)
    assert engine.stats.blocks_held == 0
