"""How much K/V fits: the type of its elements, the pool's blocks, and the longest sequence that they hold."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from engine.core.errors import ConfigError, MemoryBudgetError
from engine.runtime.kv_layout import SCALE_BYTES, StateSpec, attends
from engine.runtime.layers.model_config import narrow_latents
from engine.system.host_limits import available_memory

_NARROW = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_FIRST_WITH_FP8 = (8, 9)


def resolve_kv_dtype(setting: str, model_dtype: torch.dtype, specs: Sequence[StateSpec]) -> torch.dtype:
    """Return the type of --kv-cache-dtype. Raises ConfigError without room for scales, and for latents in fp8."""
    if setting not in _NARROW:
        return model_dtype
    if setting != "int8" and any(spec.is_latent for spec in attends(specs)):
        raise narrow_latents(setting)
    odd = next((spec.head_dim for spec in attends(specs) if spec.pool_dim(torch.int8) % SCALE_BYTES), None)
    if odd is not None:
        raise ConfigError(
            f"--kv-cache-dtype is {setting!r}, which needs a head_dim that is a multiple of {SCALE_BYTES}, and the "
            f"model's is {odd}; leave it out."
        )
    return _NARROW[setting]


def require_fp8(device: torch.device) -> None:
    """Raise ConfigError for a device without e4m3 instructions."""
    if device.type != "cuda":
        raise ConfigError("--kv-cache-dtype is 'fp8'; choose one of auto, int8 on a CPU, which knows no fp8.")
    capability = torch.cuda.get_device_capability(device)
    if capability < _FIRST_WITH_FP8:
        raise ConfigError(
            f"--kv-cache-dtype is 'fp8', which needs compute capability {'.'.join(map(str, _FIRST_WITH_FP8))} or newer, "
            f"and {torch.cuda.get_device_name(device)} has {'.'.join(map(str, capability))}; choose int8, which takes no "
            "more memory."
        )


class PoolSize(NamedTuple):
    """The pool's size, and the longest sequence that it can hold."""

    num_blocks: int
    max_model_len: int


class PoolBudget(NamedTuple):
    """The pool's bytes, how the rest is used, and the setting that would raise them."""

    num_bytes: int
    account: str = ""
    remedy: str = "raise --kv-cache-memory-bytes"


def fit_pool(
    budget: PoolBudget,
    bytes_per_block: int,
    block_size: int,
    blocks_of: Callable[[int], int],
    *,
    model_len: int,
    asked_len: int | None,
) -> PoolSize:
    """Return the blocks that the budget holds, and the longest sequence they serve.

    `blocks_of` returns how many blocks a sequence of a length needs.

    If `asked_len` is None (--max-model-len auto) the length is lowered to the longest that fits. A requested length
    that does not fit is a MemoryBudgetError, and so is a budget below one block.
    """
    num_blocks = max(budget.num_bytes // bytes_per_block, 0)
    lengths = range(0, max(num_blocks * block_size, asked_len or model_len) + block_size, block_size)
    num_fitting = bisect_right(lengths, num_blocks, key=blocks_of)  # 0 where not even a recurrent state fits
    capacity = lengths[num_fitting - 1] if num_fitting else 0
    account = f" ({budget.account})" if budget.account else ""
    if not capacity:
        raise MemoryBudgetError(
            f"The KV pool may use {_mib(max(budget.num_bytes, 0))} MiB{account}, and one block of {block_size} tokens "
            f"needs {_mib(blocks_of(block_size) * bytes_per_block)} MiB; {budget.remedy}, or choose a smaller model."
        )
    if asked_len is not None and asked_len > capacity:
        asked_blocks = blocks_of(asked_len)
        raise MemoryBudgetError(
            f"--max-model-len is {asked_len}, which needs {asked_blocks} blocks of K/V ({_mib(asked_blocks * bytes_per_block)} "
            f"MiB), and the KV pool's {num_blocks} blocks hold {capacity} tokens{account}; set it to at most {capacity}, "
            f"or to auto for as much as fits, or {budget.remedy}."
        )
    return PoolSize(num_blocks, min(asked_len or model_len, capacity))


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f}"


def default_cpu_budget() -> int:
    """Return a quarter of the available main memory, at most 2 GiB."""
    return min(2 << 30, available_memory() // 4)
