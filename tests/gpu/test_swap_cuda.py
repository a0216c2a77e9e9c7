"""Swap on a CUDA device: blocks come back as they went while steps go on, and answers are those of an engine without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.core.stats import PreemptionKind, SwapDirection
from engine.core.step import StepPlan
from engine.runtime.attention.table import load_backend
from engine.runtime.kv_layout import AttentionSpec
from engine.runtime.pool.kv_cache import KVCache
from tests.cpu.test_models_families import CASES, write_tiny
from tests.gpu.test_engine_cuda import answers
from tests.gpu.test_engine_cuda import build as build_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("is_staged_in_parts", [False, True], ids=["", "parts"])
def test_blocks_come_back_as_they_went(
    backend: str, dtype: torch.dtype, is_staged_in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every plan overwrites what it swapped out, at once and on the step's own stream, as a step would."""
    from engine.runtime.stores import pinned

    device = torch.device("cuda")
    specs = [AttentionSpec(8, 4, 64, 1.0)] * 6
    cache = KVCache(specs, load_backend(backend, device), num_blocks=64, block_size=16, dtype=dtype, device=device)
    for view in cache.blocks:
        view.copy_(torch.randint(-100, 100, view.shape, device=device))
    if is_staged_in_parts:
        size = sum(view[0].nbytes for view in cache.blocks)
        monkeypatch.setattr(pinned, "STAGING_BYTES", 3 * size)
    host = pinned.PinnedPool(cache.blocks, 64, device)
    before = [view.clone() for view in cache.blocks]
    order = torch.randperm(64).tolist()
    for step, begin in enumerate(range(0, 64, 16)):
        blocks = order[begin : begin + 16]
        host.begin(StepPlan(step, swap_out=[(block, 63 - block) for block in blocks]))
        for view in cache.blocks:
            view[blocks] = 0
    for step, begin in enumerate(range(0, 64, 16), start=4):
        plan = StepPlan(step, swap_in=[(63 - block, block) for block in order[begin : begin + 16]])
        host.begin(plan)
        host.bring_in(plan)
    host.begin(StepPlan(8))
    for view, old in zip(cache.blocks, before, strict=True):
        assert torch.equal(view, old)
    host.close()


@pytest.mark.parametrize("depth", [False, True], ids=["depth0", "depth1"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_an_engine_that_swaps_says_what_a_roomy_one_says(kv_cache_dtype: str, depth: bool, tmp_path: Path) -> None:
    write_tiny(CASES["qwen3"], tmp_path)
    setting = {"async_scheduling": depth, "kv_cache_dtype": kv_cache_dtype, "attention_backend": "torch"}
    expected = answers(build_tiny(tmp_path, "cuda", **setting))
    tight = {"kv_cache_memory_bytes": 1 << (18 if kv_cache_dtype == "auto" else 16), "block_size": 8}
    engine = build_tiny(tmp_path, "cuda", swap_space=0.01, **tight, **setting)
    assert answers(engine) == expected
    assert engine.stats.preempted[PreemptionKind.SWAP] > 0
    assert engine.stats.swapped_blocks[SwapDirection.IN] > 0
    assert engine.stats.host_blocks_held == 0
