"""The K/V pool as the Triton kernels see it, and the kernel that stores new rows.

A program reads one head's rows of a block, a contiguous run (4 KiB for 16 x 128 numbers of 16 bits). In a narrow pool, whose rows are four bytes longer (kv_layout.py), a head's run has the numbers of all its rows first, then
their float32 scales, so the numbers are aligned and read 16 at a time. Engine thread.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.runtime.kv_layout import PEAKS, SCALE_BYTES, SMALLEST_PEAK


class PoolView(NamedTuple):
    """One layer's pool for the kernels; a narrow pool's scales are its memory as float32."""

    k: Tensor
    v: Tensor  # the same as k for latents, which hold both
    k_scales: Tensor | None
    v_scales: Tensor | None
    strides: tuple[int, int]  # of a block, of a head
    block_size: int


def view_pool(k: Tensor, v: Tensor) -> PoolView:
    """Return a view of one layer's K and V, whose blocks may be any number apart; latents are both."""
    _, _, block_size, width = k.shape
    assert k.stride() == v.stride()
    assert k.stride()[1:] == (block_size * width, width, 1)
    scales = [x.view(torch.float32) if x.dtype in PEAKS else None for x in (k, v)]
    return PoolView(k, v, scales[0], scales[1], (k.stride(0), k.stride(1)), block_size)


_ROUND = tl.constexpr(
    12582912.0
)  # 1.5 * 2**23: adding and subtracting it rounds a small float32 to the nearest integer
_SMALLEST = tl.constexpr(SMALLEST_PEAK)


@triton.jit
def quantise(rows, PEAK: tl.constexpr, DTYPE: tl.constexpr):
    """Return rows [R, dims] as numbers up to PEAK in DTYPE, and their scales [R].

    The definition is in kv_layout.py. A row with NaN or infinity gets a scale that makes it NaN.
    """
    rows = rows.to(tl.float32)
    peak = tl.maximum(tl.max(tl.abs(rows), 1), _SMALLEST)
    is_broken = tl.max((rows != rows).to(tl.int32), 1) > 0
    scaled = rows * tl.div_rn(PEAK, peak)[:, None]
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    if DTYPE.is_int8():  # to fp8, the conversion itself rounds
        scaled = (scaled + _ROUND) - _ROUND
    return scaled.to(DTYPE), tl.where(is_broken, float("nan"), tl.div_rn(peak, PEAK))


@triton.jit
def _store_rows(rows, pool, scales, at, scales_at, heads, dims, mask, NUM_HEADS: tl.constexpr, PEAK: tl.constexpr):
    """Store one token's rows [heads, dims] at offsets `at` [heads], and scales at `scales_at`."""
    if scales is not None:
        rows, scale = quantise(rows, PEAK, pool.dtype.element_ty)
        tl.store(scales + scales_at, scale, mask=heads < NUM_HEADS)
    tl.store(pool + at[:, None] + dims[None, :], rows, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _store_kernel(
    k,  # [T, Hkv, D], as v
    v,
    k_pool,
    v_pool,
    k_scales,
    v_scales,
    slots,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    block_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PEAK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:  # a padding token of a captured graph
        return
    heads, dims = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    mask = (heads < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    block = slot // BLOCK_SIZE * block_stride + heads * head_stride
    offset = slot % BLOCK_SIZE
    at = block + offset * HEAD_DIM
    scales_at = (block + BLOCK_SIZE * HEAD_DIM) // 4 + offset
    rows = tl.load(k + token * k_stride + heads[:, None] * k_head_stride + dims[None, :], mask=mask, other=0)
    _store_rows(rows, k_pool, k_scales, at, scales_at, heads, dims, mask, NUM_HEADS, PEAK)
    if v is not None:  # else latents
        rows = tl.load(v + token * v_stride + heads[:, None] * v_head_stride + dims[None, :], mask=mask, other=0)
        _store_rows(rows, v_pool, v_scales, at, scales_at, heads, dims, mask, NUM_HEADS, PEAK)


def store_kv(k: Tensor, v: Tensor | None, pool: PoolView, slots: Tensor) -> None:
    """Write k, v [T, num_kv_heads, head_dim] at slots [T] int64; negative slots store nothing.

    Without v the rows are latents.
    """
    num_tokens, heads, dim = k.shape
    assert k.stride(2) == 1
    assert v is None or v.stride(2) == 1
    assert pool.k.shape[1] == heads
    assert pool.k.shape[3] == dim + SCALE_BYTES * (pool.k_scales is not None)
    _store_kernel[(num_tokens,)](
        k,
        v,
        pool.k,
        pool.v,
        pool.k_scales,
        pool.v_scales,
        slots,
        k.stride(0),
        k.stride(1),
        *(v.stride()[:2] if v is not None else (0, 0)),
        *pool.strides,
        NUM_HEADS=heads,
        HEAD_DIM=dim,
        BLOCK_SIZE=pool.block_size,
        BLOCK_H=triton.next_power_of_2(heads),
        BLOCK_D=triton.next_power_of_2(dim),
        PEAK=PEAKS.get(pool.k.dtype, 1.0),
        num_warps=4,
    )
