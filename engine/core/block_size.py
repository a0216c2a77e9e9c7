"""Which block size suits the requests that really come (--block-size auto).

A sequence's last block is seldom full, and what it lacks is memory that nobody can use: internal fragmentation. Small
blocks waste less of it, but attention may read them more slowly. Both are known, the lengths from the sequences that
ended, the speeds from steps that were timed at the start, so the sizes are weighed by what they come to together. An
idle engine then cuts its pool anew; with it goes what the prefix cache held, so a small gain is not worth it. Owned by
the engine thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from engine.core.config import SchedulerConfig
from engine.core.page_table import blocks_for

CANDIDATES = (8, 16, 32, 64, 128)
_FEWEST = 64  # sequences before anything is concluded
_LEAST_GAIN = 0.02
_NEARLY = 0.05  # speeds that differ by no more may be the same


def waste(lengths: Iterable[int], block_size: int) -> float:
    """The share of the blocks of sequences of such lengths that stays empty at their end, 0 to 1."""
    used = held = 0
    for length in lengths:
        used += length
        held += blocks_for(length, block_size) * block_size
    return 1 - used / held if held else 0.0


def with_block_size(config: SchedulerConfig, block_size: int) -> SchedulerConfig:
    """The same pool in other blocks."""
    num_blocks = config.num_blocks * config.block_size // block_size
    return replace(config, block_size=block_size, num_blocks=num_blocks)


class BlockSizeChooser:
    """Says when another block size would have served the recent sequences better."""

    def __init__(self, speeds: Mapping[int, float]) -> None:
        """`speeds`: tokens a second of decoding, or anything proportional to them, by block size."""
        self._speeds = dict(speeds)
        self._num_ended = 0  # sequences, at the last change

    @property
    def first(self) -> int:
        """Where to begin, while no lengths are known: the smallest that is nearly as fast as the fastest."""
        return min(size for size, speed in self._speeds.items() if speed >= (1 - _NEARLY) * max(self._speeds.values()))

    def better_than(self, current: int, lengths: Collection[int], num_ended: int) -> int | None:
        """A block size that is worth a change, or None.

        `lengths` are of the last of `num_ended` sequences. After a change as many have to come before the next.
        """
        if num_ended - self._num_ended < _FEWEST:
            return None
        worth = {size: speed * (1 - waste(lengths, size)) for size, speed in self._speeds.items()}
        best = max(worth, key=lambda size: (worth[size], -size))
        if worth[best] < (1 + _LEAST_GAIN) * worth[current]:
            return None
        self._num_ended = num_ended
        return best
