"""Chooses the block size for a machine and its requests: `--block-size auto`, once at the start.

The last block of a sequence is seldom full, and memory in it is wasted. Small blocks waste less, but attention may read
them more slowly. Speeds are timed at the start and lengths are those of the last run, so both are weighed together. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from engine.core.config import SchedulerConfig
from engine.core.kv.page_table import blocks_for

CANDIDATES = (8, 16, 32, 64, 128)
_FEWEST = 64  # sequences before anything is concluded
_NEARLY = 0.05  # speeds that differ by no more may be the same


def waste(lengths: Iterable[int], block_size: int) -> float:
    """Return the share of their blocks that sequences of these lengths leave empty, 0 to 1."""
    used = held = 0
    for length in lengths:
        used += length
        held += blocks_for(length, block_size) * block_size
    return 1 - used / held if held else 0.0


def with_block_size(config: SchedulerConfig, block_size: int) -> SchedulerConfig:
    """Return the settings of the same pool in blocks of another size."""
    num_blocks = config.num_blocks * config.block_size // block_size
    return replace(config, block_size=block_size, num_blocks=num_blocks)


def choose(speeds: Mapping[int, float], lengths: Collection[int]) -> int:
    """Return the block size to serve with: of `speeds`, tokens a second by size, for sequences of these lengths.

    With few lengths known it is the smallest size that is nearly as fast as the fastest.
    """
    if len(lengths) < _FEWEST:
        return min(size for size, speed in speeds.items() if speed >= (1 - _NEARLY) * max(speeds.values()))
    worth = {size: speed * (1 - waste(lengths, size)) for size, speed in speeds.items()}
    return max(worth, key=lambda size: (worth[size], -size))
