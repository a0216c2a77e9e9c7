"""The head-major layout of a K or V pool, and the content of a narrow pool.

The layout is [num_kv_heads, num_blocks, block_size, head_dim]. One head's run of adjacent blocks is one contiguous
matrix, so attention reads it without a copy. In a narrow pool, of int8 or fp8 (e4m3), the last dimension is SCALE_BYTES
longer in any layout: a token's row of one head has numbers up to the PEAK of their type, and a float32 scale. Engine
thread.

fp8 has an exponent, and could do without a scale or with one a head. But keys of some models are larger than 448, and
numbers below 2^-6 lose digits; a scale a head would require calibration. A scale a row is right for all, and the
kernels apply it to scores and weights: one product for each of these instead of one for each number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SCALE_BYTES = 4
PEAKS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the types of narrow pools, and the largest number of each
# Least peak of a row. Smaller ones, such as zeros, are stored as if they had it; otherwise the scale or its inverse
# would not be a normal float32.
SMALLEST_PEAK = 2.0**-116


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One layer's attention, as the model defines it.

    `window` w lets position p see p - w + 1 .. p; None sees all. `softcap` c replaces a score s by c * tanh(s / c).
    `sinks`, shape [num_heads], joins the softmax as one more score a head that carries no value.

    With `value_dim` the layer caches latents: one row of `head_dim` numbers a token, shared by all heads. The row is
    the key, its first `value_dim` numbers are the value, and there is no V pool.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    value_dim: int | None = None

    @property
    def is_latent(self) -> bool:
        """Return whether one pool holds the keys, and the values in them."""
        return self.value_dim is not None

    @property
    def num_pools(self) -> int:
        """Return the number of pools: K and V, or one of latents."""
        return 1 if self.is_latent else 2

    @property
    def out_dim(self) -> int:
        """Return the width of a head's result."""
        return self.head_dim if self.value_dim is None else self.value_dim


def head_major_shape(spec: AttentionSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """Return the shape of one layer's K, or V, or latents."""
    return (spec.num_kv_heads, num_blocks, block_size, spec.head_dim)


def store(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows [T, num_kv_heads, head_dim] at slots [T]."""
    stored = to_pool(rows, pool.dtype).transpose(0, 1)
    movable(pool).flatten(1, 2).index_copy_(1, slots, movable(stored))


def to_pool(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows [..., head_dim] as stored in a pool of `dtype`; kv_store.h is identical."""
    if dtype not in PEAKS:
        return rows
    wide = rows.float()
    peak = wide.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_PEAK)
    factor = torch.full_like(peak, PEAKS[dtype]) / peak
    # A row with a NaN gets a scale that makes the whole row NaN again.
    numbers = (wide * factor).nan_to_num(0.0)
    numbers = (numbers.round() if dtype == torch.int8 else numbers).to(dtype)
    return torch.cat((movable(numbers), (peak / PEAKS[dtype]).view(torch.int8)), -1).view(dtype)


def from_pool(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of a pool as numbers of `dtype`."""
    if rows.dtype not in PEAKS:
        return rows
    return (rows[..., :-SCALE_BYTES].float() * rows[..., -SCALE_BYTES:].view(torch.float32)).to(dtype)


def movable(rows: Tensor) -> Tensor:
    """Return the memory in a type that torch can index; fp8 is not one."""
    return rows.view(torch.int8) if rows.dtype == torch.float8_e4m3fn else rows
