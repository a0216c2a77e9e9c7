"""The head-major layout of a K or V pool: [num_kv_heads, num_blocks, block_size, head_dim], and what an int8 pool holds.

One head's run of adjacent blocks is one contiguous matrix, so attention can read it without a copy. In an int8 pool of
any layout the last dimension is SCALE_BYTES longer, and so is what one token's row of one head takes: numbers from -127
to 127, and the float32 they are to be multiplied by. Engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.runtime.attention.base import AttentionSpec

SCALE_BYTES = 4


def head_major_shape(spec: AttentionSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """Shape of one layer's K, or V."""
    return (spec.num_kv_heads, num_blocks, block_size, spec.head_dim)


def store(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows [T, num_kv_heads, head_dim] at slots [T]."""
    pool.flatten(1, 2).index_copy_(1, slots, to_pool(rows, pool.dtype).transpose(0, 1))


def to_pool(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [..., head_dim] as a pool of `dtype` holds them. native/kv_store.h says the same, to the bit."""
    if dtype != torch.int8:
        return rows
    wide = rows.float()
    peak = wide.abs().amax(-1, keepdim=True)
    factor = (torch.full_like(peak, 127.0) / peak).clamp(max=torch.finfo(torch.float32).max)
    # A row with a NaN keeps a scale that makes NaN of all of it again.
    numbers = (wide * factor).round().nan_to_num(0.0).to(torch.int8)
    return torch.cat((numbers, (peak / 127.0).view(torch.int8)), -1)


def from_pool(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a pool as numbers of `dtype`."""
    if rows.dtype != torch.int8:
        return rows
    return (rows[..., :-SCALE_BYTES].float() * rows[..., -SCALE_BYTES:].view(torch.float32)).to(dtype)


def copy_blocks(pool: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks (source, destination); all sources are read before any destination is written."""
    sources, destinations = torch.tensor(pairs, device=pool.device).unbind(1)
    pool.index_copy_(1, destinations, pool.index_select(1, sources))
