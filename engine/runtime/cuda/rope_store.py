"""Prepares queries, keys and values for attention in one launch.

Each query and key head is normalised (some models) and rotated by its position. Queries go to a new tensor, keys and
values to the paged pool of cuda/store.py, quantised if it is narrow. Queries are not rotated in place, because the
threads of a program read each other's elements. Engine thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.runtime.cuda.store import PoolView, quantise
from engine.runtime.kv_layout import PEAKS, SCALE_BYTES

_HEADS = 4  # of a program; with 128 dimensions a warp each, 4 values a thread. To be tuned on a GPU, with 2 and 8.


def rotate_and_store(
    qkv: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    pool: PoolView,
    slots: Tensor,
) -> Tensor:
    """Normalise, rotate and store; return the queries [T, num_heads, head_dim].

    qkv [T, heads, head_dim] has query heads, then key heads, then value heads; tokens need not be adjacent. `angles`
    are Rotary's cos and signed sin [T, rope_dim], None without positions; `norms` are the weights [head_dim] of queries
    and keys. The pool is of qkv's type or narrow; rows are rounded to qkv's type first in both cases. slots [T] are
    block * block_size + offset; a slot below 0 stores nothing.
    """
    num_tokens, num_all, dim = qkv.shape
    num_kv_heads = pool.k.shape[1]
    num_heads = num_all - 2 * num_kv_heads
    is_narrow = pool.k.dtype in PEAKS
    assert qkv.stride(2) == 1
    assert pool.k.dtype == pool.v.dtype
    assert pool.k.dtype == qkv.dtype or is_narrow
    assert pool.k.shape[3] == dim + SCALE_BYTES * is_narrow
    assert slots.shape == (num_tokens,)
    assert slots.is_contiguous()
    q = torch.empty((num_tokens, num_heads, dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return q
    cos, signed_sin = (qkv, qkv) if angles is None else angles
    q_weight, k_weight = (qkv, qkv) if norms is None else norms
    if angles is not None:
        assert cos.shape == signed_sin.shape
        assert cos.is_contiguous()
        assert signed_sin.is_contiguous()
    _rotate_and_store[(num_tokens, triton.cdiv(num_all, _HEADS))](
        qkv,
        q,
        cos,
        signed_sin,
        q_weight,
        k_weight,
        pool.k,
        pool.v,
        pool.k_scales,
        pool.v_scales,
        slots,
        *qkv.stride()[:2],
        *pool.strides,
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        DIM=dim,
        ROPE_DIM=0 if angles is None else cos.shape[1],
        HAS_NORM=norms is not None,
        BLOCK_SIZE=pool.block_size,
        PEAK=PEAKS.get(pool.k.dtype, 1.0),
        HEADS=_HEADS,
        BLOCK=triton.next_power_of_2(dim),
        num_warps=_HEADS,
    )
    return q


@triton.jit
def _norm_factor(x, DIM: tl.constexpr, eps):
    """Return 1 / rms of each row [HEADS, 1] of x [HEADS, BLOCK], which is zero after DIM."""
    return 1.0 / tl.sqrt_rn(tl.sum(x * x, 1, keep_dims=True) / DIM + eps)


@triton.jit
def _normed(x, factor, q_weight_ptr, k_weight_ptr, dims, is_q, is_k, DTYPE: tl.constexpr):
    """Return x times factor and weight, rounded to DTYPE as between two operations."""
    q_weight = tl.load(q_weight_ptr + dims, is_q, 0.0).to(tl.float32)
    weight = q_weight + tl.load(k_weight_ptr + dims, is_k, 0.0).to(tl.float32)
    return (x * factor * weight).to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])  # a piece of a buffer, anywhere in it
def _rotate_and_store(
    qkv_ptr,
    q_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    k_pool_ptr,
    v_pool_ptr,
    k_scales_ptr,
    v_scales_ptr,
    slots_ptr,
    token_stride,
    head_stride,
    pool_block_stride,
    pool_head_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PEAK: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for HEADS heads of a token, of any of the three kinds."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dim = tl.arange(0, BLOCK)[None, :]
    inside = dim < DIM
    is_q = head < NUM_HEADS
    is_k = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_v = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)

    head_at = qkv_ptr + token * token_stride + head * head_stride
    raw = tl.load(head_at + dim, (is_q | is_k | is_v) & inside, 0.0)
    x = raw.to(tl.float32)
    if HAS_NORM:
        factor = _norm_factor(x, DIM, eps)
        x = _normed(x, factor, q_weight_ptr, k_weight_ptr, dim, is_q & inside, is_k & inside, raw.dtype)
    if ROPE_DIM > 0:
        # Each element and its partner, which is half the rotated dimensions away.
        turns = dim < ROPE_DIM
        other_dim = tl.where(dim < ROPE_DIM // 2, dim + ROPE_DIM // 2, dim - ROPE_DIM // 2)
        other = tl.load(head_at + other_dim, (is_q | is_k) & turns, 0.0).to(tl.float32)
        if HAS_NORM:
            is_other_q, is_other_k = is_q & turns, is_k & turns
            other = _normed(other, factor, q_weight_ptr, k_weight_ptr, other_dim, is_other_q, is_other_k, raw.dtype)
        angle_at = token * ROPE_DIM + dim
        cos = tl.load(cos_ptr + angle_at, turns, 1.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle_at, turns, 0.0).to(tl.float32)
        x = x * cos + other * sin

    tl.store(q_ptr + (token * NUM_HEADS + head) * DIM + dim, x, is_q & inside)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    rows = tl.where(is_v, raw, x.to(raw.dtype))
    kv_head = tl.where(head < NUM_HEADS + NUM_KV_HEADS, head - NUM_HEADS, head - NUM_HEADS - NUM_KV_HEADS)
    run = slot // BLOCK_SIZE * pool_block_stride + kv_head * pool_head_stride
    position = slot % BLOCK_SIZE
    if k_scales_ptr is not None:
        rows, scales = quantise(rows, PEAK, k_pool_ptr.dtype.element_ty)
        at = (run + BLOCK_SIZE * DIM) // 4 + position
        tl.store(k_scales_ptr + at, scales[:, None], is_k)
        tl.store(v_scales_ptr + at, scales[:, None], is_v)
    at = run + position * DIM + dim
    tl.store(k_pool_ptr + at, rows, is_k & inside)
    tl.store(v_pool_ptr + at, rows, is_v & inside)
