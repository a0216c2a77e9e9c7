"""What models take of the memory, by their files and settings, and whether those that are loaded at once fit it.

Start-up; imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from engine.core.errors import ConfigError
from engine.settings.engine_config import EngineConfig
from engine.startup.ahead import runs_on_cpu
from engine.startup.model_check import weight_bytes
from engine.system.host_limits import available_memory
from engine.system.progress import human_bytes

_POOLS = 4  # a quarter of the free memory is for KV pools whose size is not given
_MOST_POOLS = 2 << 30


class Memory(NamedTuple):
    """The bytes that a model takes at most."""

    weights: int = 0  # packed; 0 of files that are not here yet
    pool: int = 0
    caches: int = 0  # host memory of blocks, vectors of images

    @property
    def total(self) -> int:
        """Return the sum."""
        return sum(self)


def pool_share(num_models: int) -> int:
    """Return the most that the KV pool of one of so many models takes, where no size is given."""
    return min(_MOST_POOLS, available_memory() // _POOLS) // num_models


def memory_of(config: EngineConfig, *, takes_images: bool) -> Memory:
    """Return what a model takes."""
    pool = config.kv_cache_memory_bytes or config.most_pool_bytes or 0
    blocks = int((config.swap_space + config.kv_offload_gib) * (1 << 30))
    return Memory(weight_bytes(config), pool, blocks + config.image_cache_memory * takes_images)


def memory_limit(asked: int | None, configs: Sequence[EngineConfig]) -> int | None:
    """Return the bytes that models may take together; None if that is not known, as on a GPU."""
    return asked or (available_memory() if all(map(runs_on_cpu, configs)) else None)


def check_sum(at_once: Mapping[str, Memory], limit: int | None) -> None:
    """Raise ConfigError for models that do not fit the memory together."""
    total = sum([each.total for each in at_once.values()])
    if limit is None or total <= limit:
        return
    rows = "; ".join(
        f"{name} {human_bytes(each.total)} (weights {human_bytes(each.weights)}, KV pool {human_bytes(each.pool)}, "
        f"caches {human_bytes(each.caches)})"
        for name, each in at_once.items()
    )
    raise ConfigError(
        f"The models that are loaded at once need {human_bytes(total)}, and {human_bytes(limit)} are there "
        f"(--models-memory): {rows}. Give them smaller --kv-cache-memory-bytes, or have fewer at once by --keep or --models-max."
    )
