"""Chooses the block size for a machine and its requests: `--block-size auto`, once at the start.

The last block of a sequence is seldom full, and memory in it is wasted. Small blocks waste less, but attention may read
them more slowly. Speeds are timed at the start and lengths are those of the last run, from a JSON file for each model.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from engine.core.config import SchedulerConfig
from engine.core.page_table import blocks_for
from engine.system.cache_folder import cache_folder, keep
from engine.system.regular_file import read_json

CANDIDATES = (8, 16, 32, 64, 128)
_FEWEST = 64  # sequences before anything is concluded
_NEARLY = 0.05  # speeds that differ by no more may be the same
_MAX_BYTES = 1 << 20  # of a file of lengths
_VERSION = 1


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


def lengths_path(model: str) -> Path:
    """Return the file of a model's lengths."""
    name = blake2b(model.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return cache_folder() / "lengths" / f"{name}.json"


def load_lengths(path: Path) -> list[int]:
    """Return the lengths of the last run; none from a file that cannot be read."""
    with suppress(OSError, ValueError, TypeError):
        document = read_json(path, _MAX_BYTES)
        if isinstance(document, dict) and document.get("version") == _VERSION:
            return [length for length in document.get("lengths", ()) if isinstance(length, int) and length > 0]
    return []


def save_lengths(path: Path, lengths: Sequence[int]) -> None:
    """Replace the file if anything was served and the folder can be written to."""
    if lengths:
        keep(path, json.dumps({"version": _VERSION, "lengths": list(lengths)}))
