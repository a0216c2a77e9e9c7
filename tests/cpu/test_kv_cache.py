"""What a block costs, how many fit, and what is said when they do not."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from engine.core.errors import ConfigError, MemoryBudgetError
from engine.core.page_table import blocks_for
from engine.runtime.attention.table import load_backend
from engine.runtime.kv_layout import AttentionSpec
from engine.runtime.pool import pool_size
from engine.runtime.pool.groups import one_group
from engine.runtime.pool.kv_cache import KVCache
from engine.runtime.pool.pool_size import PoolBudget, PoolSize, default_cpu_budget, fit_pool, resolve_kv_dtype
from engine.runtime.stores import pinned

in_blocks = partial(blocks_for, block_size=16)

CPU = torch.device("cpu")


def test_a_block_of_the_classic_example() -> None:
    specs = [AttentionSpec(32, 8, 128, 1.0)] * 32
    assert 16 * one_group(specs, torch.float16).cuts[-1] == 2_097_152


def test_layers_may_differ() -> None:
    specs = [AttentionSpec(4, 2, 8, 1.0), AttentionSpec(4, 1, 16, 1.0)]
    assert 4 * one_group(specs, torch.float32).cuts[-1] == 2 * 4 * 4 * (2 * 8 + 1 * 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_the_tensors_weigh_what_the_formula_says(dtype: torch.dtype) -> None:
    specs = [AttentionSpec(4, 2, 8, 1.0), AttentionSpec(4, 1, 16, 1.0)]
    pool = KVCache(specs, load_backend("torch", CPU), num_blocks=3, block_size=4, dtype=dtype, device=CPU)
    weight = sum(tensor.nbytes for tensor in (*pool._keys.values(), *pool._values.values()))
    assert weight == 3 * 4 * one_group(specs, dtype).cuts[-1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_blocks_go_out_and_in_by_a_gather(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where each copy costs a launch: a portion at a time, and the same bytes as block by block."""
    specs = [AttentionSpec(4, 2, 8, 1.0), AttentionSpec(4, 1, 16, 1.0)]
    pool = KVCache(specs, load_backend("torch", CPU), num_blocks=9, block_size=4, dtype=dtype, device=CPU)
    size = 4 * one_group(specs, dtype).cuts[-1]
    rows = np.random.default_rng(3).integers(0, 100, (5, size), np.uint8)
    blocks = [7, 2, 3, 8, 0]
    pool.write_blocks(blocks, rows)
    found, plainly = np.zeros_like(rows), np.zeros_like(rows)
    pool.read_blocks(blocks, plainly)
    assert (plainly == rows).all()
    copies = []
    monkeypatch.setattr(pinned, "STAGING_BYTES", 2 * size)
    gather, scatter = pinned.gather, pinned.scatter
    monkeypatch.setattr(pinned, "gather", lambda *args: (copies.append(len(args[1])), gather(*args)))
    monkeypatch.setattr(pinned, "scatter", lambda *args: (copies.append(len(args[1])), scatter(*args)))
    pool._device = torch.device("cuda", 0)
    pool.read_blocks(blocks, found)
    assert (found == rows).all()
    other = rows[::-1].copy()
    other.flags.writeable = False
    pool.write_blocks(blocks, other)
    pool.read_blocks(blocks, found)
    assert (found == other).all()
    assert copies == [2, 2, 1] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_a_new_pool_has_no_nan(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_size, "require_fp8", lambda device: None)
    specs = [AttentionSpec(4, 2, 8, 1.0)]
    pool = KVCache(specs, load_backend("torch", CPU), num_blocks=64, block_size=16, dtype=dtype, device=CPU)
    assert not any(view.view(torch.uint8).any() for view in (*pool._keys.values(), *pool._values.values()))


def test_int8_costs_a_byte_a_number_and_a_scale_a_row() -> None:
    assert AttentionSpec(9, 3, 64, 1.0).bytes_a_token(torch.int8) == 2 * 3 * (64 + 4)


def test_the_kv_dtype_that_is_asked_for() -> None:
    specs = [AttentionSpec(4, 2, 8, 1.0), AttentionSpec(4, 2, 10, 1.0)]
    assert resolve_kv_dtype("auto", torch.bfloat16, specs) is torch.bfloat16
    assert resolve_kv_dtype("int8", torch.bfloat16, specs[:1]) is torch.int8
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype is 'int8', .* multiple of 4, and the model's is 10"):
        resolve_kv_dtype("int8", torch.bfloat16, specs)


def test_the_budget_is_used_up() -> None:
    assert fit_pool(PoolBudget(1000), 90, 16, in_blocks, model_len=64, asked_len=None) == PoolSize(11, 64)
    assert fit_pool(PoolBudget(1000), 90, 16, in_blocks, model_len=64, asked_len=50) == PoolSize(11, 50)


def test_a_length_nobody_asked_for_is_lowered() -> None:
    assert fit_pool(PoolBudget(1000), 90, 16, in_blocks, model_len=8192, asked_len=None) == PoolSize(11, 176)


def test_a_length_that_was_asked_for_is_refused_with_the_largest_that_fits() -> None:
    budget = PoolBudget(11 << 20, "weights take the rest", "pay more")
    with pytest.raises(
        MemoryBudgetError,
        match=r"--max-model-len is 177, which needs 12 blocks .*\(12\.0 MiB\), .* 11 blocks hold 176 tokens "
        r"\(weights take the rest\); set it to at most 176, or to auto .*, or pay more",
    ):
        fit_pool(budget, 1 << 20, 16, in_blocks, model_len=8192, asked_len=177)


@pytest.mark.parametrize("budget", [89 << 20, 0, -5])
def test_less_than_a_block_is_an_error(budget: int) -> None:
    with pytest.raises(
        MemoryBudgetError, match=r"one block of 16 tokens needs 90\.0 MiB; raise --kv-cache-memory-bytes"
    ):
        fit_pool(PoolBudget(budget), 90 << 20, 16, in_blocks, model_len=64, asked_len=None)


def test_more_than_there_is_is_an_error() -> None:
    with pytest.raises(MemoryBudgetError, match="which cpu memory does not have"):
        KVCache(
            [AttentionSpec(8, 8, 128, 1.0)],
            load_backend("torch", CPU),
            num_blocks=1 << 40,
            block_size=16,
            dtype=torch.float32,
            device=CPU,
        )


def test_the_default_is_a_share_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < default_cpu_budget() <= 2 << 30
    monkeypatch.setattr(pool_size, "available_memory", lambda: 1 << 30)
    assert default_cpu_budget() == 1 << 28
    monkeypatch.setattr(pool_size, "available_memory", lambda: 1 << 40)
    assert default_cpu_budget() == 2 << 30
