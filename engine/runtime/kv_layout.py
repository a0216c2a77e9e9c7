"""The head-major layout of a K or V pool: [num_kv_heads, num_blocks, block_size, head_dim], and what a narrow pool holds.

One head's run of adjacent blocks is one contiguous matrix, so attention can read it without a copy. In a narrow pool, of
int8 or fp8 (e4m3), the last dimension is SCALE_BYTES longer whatever the layout, and so is what one token's row of one
head takes: numbers up to the PEAK of their type, and the float32 they are to be multiplied by. Engine thread.

fp8 has an exponent of its own, and could go without a scale or with one a head. But keys of some models are larger than
448, and much of what is smaller than 2^-6 would lie among the numbers that lose their digits; to place a head rightly
somebody would have to see its numbers first. A scale a row is right for all, and the kernels spend it on scores and
weights: one product for each of these instead of one for each number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SCALE_BYTES = 4
PEAKS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the types of narrow pools, and the largest number of each
# Of a row. Smaller ones, zeros among them, are stored as if they had it: neither their scale nor its inverse would be a
# normal float32 otherwise.
SMALLEST_PEAK = 2.0**-116


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One layer's attention, as the model defines it.

    `window` w lets position p see p - w + 1 .. p; None sees all. `softcap` c replaces a score s by c * tanh(s / c).
    `sinks`, shape [num_heads], joins the softmax as one more score a head that carries no value.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


def head_major_shape(spec: AttentionSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """Shape of one layer's K, or V."""
    return (spec.num_kv_heads, num_blocks, block_size, spec.head_dim)


def store(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows [T, num_kv_heads, head_dim] at slots [T]."""
    stored = to_pool(rows, pool.dtype).transpose(0, 1)
    movable(pool).flatten(1, 2).index_copy_(1, slots, movable(stored))


def to_pool(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [..., head_dim] as a pool of `dtype` holds them. native/kv_store.h says the same, to the bit."""
    if dtype not in PEAKS:
        return rows
    wide = rows.float()
    peak = wide.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_PEAK)
    factor = torch.full_like(peak, PEAKS[dtype]) / peak
    # A row with a NaN keeps a scale that makes NaN of all of it again.
    numbers = (wide * factor).nan_to_num(0.0)
    numbers = (numbers.round() if dtype == torch.int8 else numbers).to(dtype)
    return torch.cat((movable(numbers), (peak / PEAKS[dtype]).view(torch.int8)), -1).view(dtype)


def from_pool(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a pool as numbers of `dtype`."""
    if rows.dtype not in PEAKS:
        return rows
    return (rows[..., :-SCALE_BYTES].float() * rows[..., -SCALE_BYTES:].view(torch.float32)).to(dtype)


def movable(rows: Tensor) -> Tensor:
    """The same memory as a type that torch moves by index: fp8 is not among them."""
    return rows.view(torch.int8) if rows.dtype == torch.float8_e4m3fn else rows
