"""Groups with windows that leave the pool: what comes back from a disk, or from another daemon, is what transformers says."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.budget import StepTime
from engine.core.errors import ConfigError
from engine.core.kv import tiers
from engine.core.kv.prefix_cache import request_names
from engine.core.stats import TransferKind
from engine.core.types import StepEvents, TokenEvent
from engine.handover import HandoverConfig, Prefix, open_handover
from engine.loop import Engine
from engine.settings.engine_config import EngineConfig
from engine.startup.build import build_engine
from tests.cpu import test_models_families as families
from tests.cpu.model_driver import request
from tests.cpu.test_engine_families import LONG
from tests.patience import PATIENCE_S

PROMPTS = [[*LONG, 7, 8, 9], [*LONG[:150], *LONG[:50]]]  # beyond the windows, with the tile before them
NUM_NEW = 8


def engine_on(model: Path, *, hands_over: bool = False, **changes: Any) -> Engine:
    sizes = {
        "block_size": 4,
        "max_model_len": 256,
        "max_num_seqs": 2,
        "num_gpu_blocks_override": 400,
        "dtype": "float32",
    }
    config = EngineConfig(model=str(model), device="cpu", load_format="auto", **(sizes | changes))
    engine = build_engine(config, lambda progress: None, hands_over=hands_over)
    assert engine.config.windows, "the layers are in groups"
    return engine


def largest_difference(engine: Engine, heard: queue.SimpleQueue[StepEvents], theirs: Any) -> float:
    """Return the largest difference in log probability from transformers over the answers to all prompts."""
    worst = 0.0
    for number, prompt in enumerate(PROMPTS):
        asked = request(str(number), prompt, max_tokens=NUM_NEW, logprobs=1)
        engine.submit(replace(asked, arrival_s=engine.clock()))
        tokens, found, is_open = list[int](), list[float](), True
        while is_open:
            for event in heard.get(timeout=PATIENCE_S):
                assert isinstance(event, TokenEvent)
                assert event.error is None
                tokens += event.token_ids
                found += [each.logprob for each in event.logprobs or ()]
                is_open = event.finish_reason is None
        worst = max(worst, _difference(theirs, prompt, tokens, found))
    return worst


def _difference(theirs: Any, prompt: Sequence[int], tokens: list[int], found: list[float]) -> float:
    with torch.no_grad():
        logits = theirs(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0].double()
    rows = torch.log_softmax(logits, -1)[len(prompt) - 1 :]
    return max(abs(float(row[token]) - each) for row, token, each in zip(rows, tokens, found, strict=False))


def save(name: str, folder: Path) -> Any:
    case = families.CASES[name]
    return families.save_tiny(families.Case(case.config, case.settings | {"max_position_embeddings": 256}), folder)


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
def test_an_engine_that_starts_again_goes_on_from_windows_on_the_disk(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "MAX_PARKED_S", PATIENCE_S)
    monkeypatch.setattr(StepTime, "is_known", False)
    theirs = save(name, tmp_path / "model")
    for life in range(2):
        heard: queue.SimpleQueue[StepEvents] = queue.SimpleQueue()
        config = {"kv_offload_gib": 0.05, "kv_offload_dir": str(tmp_path / "kv"), "kv_offload_disk_gib": 0.05}
        engine = engine_on(tmp_path / "model", **config)
        engine.start(heard.put)
        assert largest_difference(engine, heard, theirs) < 1e-4
        engine.stop(0.0)
        assert engine.stats.integrity_failures == 0
        # The second prompt shares 148 tokens with the first, whose blocks of the first group are in the pool by then.
        assert engine.stats.prefix_hit_tokens == (204 + 196 if life else 148)
        assert engine.stats.prefix_hits["disk"] == (204 + 196 - 148 if life else 0)  # type: ignore[index]
        assert not engine.stats.failed_transfers[TransferKind.LOAD]


def test_a_model_without_attention_is_told_which_flags_to_leave_out(tmp_path: Path) -> None:
    families.write_tiny(families.CASES["mamba2"], tmp_path)
    with pytest.raises(ConfigError, match="leave out --swap-space and --kv-offload-config"):
        engine_on(tmp_path, block_size=64, max_model_len=64, swap_space=0.01, kv_offload_gib=0.01)


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
def test_a_daemon_goes_on_from_windows_that_another_has_computed(name: str, tmp_path: Path) -> None:
    theirs = save(name, tmp_path / "model")
    heard: list[queue.SimpleQueue[StepEvents]] = [queue.SimpleQueue(), queue.SimpleQueue()]
    engines = [engine_on(tmp_path / "model", hands_over=True) for _ in heard]
    ends = [open_handover(engine, HandoverConfig(folder=tmp_path / "parcels")) for engine in engines]
    for engine, each in zip(engines, heard, strict=True):
        engine.start(each.put)
    assert largest_difference(engines[0], heard[0], theirs) < 1e-4
    for prompt in PROMPTS:
        names = request_names(request("r", prompt), engines[0].config)
        prefix = Prefix(names, prompt, names[0])
        offer = ends[0].send(prefix)
        assert offer is not None
        assert ends[1].receive(offer.name, prefix) == offer.num_blocks == (len(prompt) - 1) // 4
    assert largest_difference(engines[1], heard[1], theirs) < 1e-4
    assert engines[1].stats.prefix_hit_tokens == 204 + 196
    for engine in engines:
        engine.stop(0.0)
        assert engine.stats.integrity_failures == 0
