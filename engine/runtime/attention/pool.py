"""The head-major layout of a K or V pool: [num_kv_heads, num_blocks, block_size, head_dim].

One head's run of adjacent blocks is one contiguous matrix, so attention can read it without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.runtime.attention.base import AttentionSpec


def head_major_shape(spec: AttentionSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """Shape of one layer's K, or V."""
    return (spec.num_kv_heads, num_blocks, block_size, spec.head_dim)


def store(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows [T, num_kv_heads, head_dim] at slots [T]."""
    pool.flatten(1, 2).index_copy_(1, slots, rows.transpose(0, 1))


def copy_blocks(pool: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks (source, destination); all sources are read before any destination is written."""
    sources, destinations = torch.tensor(pairs, device=pool.device).unbind(1)
    pool.index_copy_(1, destinations, pool.index_select(1, sources))
