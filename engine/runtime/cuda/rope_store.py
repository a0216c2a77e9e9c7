"""What happens to queries, keys and values between their projection and attention, as one launch.

Each query and key head is normed (some models) and turned by its position; queries go to a tensor of their own, keys
and values to the paged pool, as int8 if that is what it holds. Queries are not turned in place: the threads of a program
read each other's elements. The pool's layout is known by its strides alone. Engine thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS = 4  # a program's; with 128 dimensions a warp each, 4 values a thread. To be swept on a card, with 2 and 8.

_LARGEST = tl.constexpr(3.4028234663852886e38)
_WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2^23: a small number added to it loses all behind the point, rounded to even


def rotate_and_store(
    qkv: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Norm, turn and store: returns the queries [T, num_heads, head_dim].

    qkv [T, heads, head_dim]: query heads, then key heads, then value heads; tokens may lie apart. `angles` are cos and
    signed sin [T, rope_dim] as Rotary makes them, None for a layer without positions; `norms` the weights [head_dim]
    for queries and for keys. The pools are views [num_blocks, block_size, num_kv_heads, head_dim] of the same strides,
    whatever they are but for the last, 1. They are of qkv's type; or of int8, and then `scales` are views [num_blocks,
    block_size, num_kv_heads] float32 of the numbers that the rows of K and of V are to be multiplied by, found as
    attention/pool.py finds them. slots [T]: block * block_size + offset; one below 0 stores nothing.
    """
    num_tokens, num_all, dim = qkv.shape
    block_size, num_kv_heads = k_pool.shape[1:3]
    num_heads = num_all - 2 * num_kv_heads
    assert k_pool.shape == v_pool.shape
    assert k_pool.stride() == v_pool.stride()
    assert qkv.stride(2) == k_pool.stride(3) == 1
    assert k_pool.dtype == v_pool.dtype == (qkv.dtype if scales is None else torch.int8)
    assert slots.shape == (num_tokens,)
    assert slots.is_contiguous()
    q = torch.empty((num_tokens, num_heads, dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return q
    cos, signed_sin = (qkv, qkv) if angles is None else angles
    q_weight, k_weight = (qkv, qkv) if norms is None else norms
    k_scales, v_scales = (None, None) if scales is None else scales
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
        k_pool,
        v_pool,
        k_scales,
        v_scales,
        slots,
        *qkv.stride()[:2],
        *k_pool.stride()[:3],
        *((0, 0, 0) if k_scales is None else k_scales.stride()),
        block_size,
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        DIM=dim,
        ROPE_DIM=0 if angles is None else cos.shape[1],
        HAS_NORM=norms is not None,
        HAS_SCALES=scales is not None,
        HEADS=_HEADS,
        BLOCK=triton.next_power_of_2(dim),
        num_warps=_HEADS,
    )
    return q


@triton.jit
def _norm_factor(x, DIM: tl.constexpr, eps):
    """1 / rms of each row of x [HEADS, BLOCK], zeros behind DIM: [HEADS, 1]."""
    return 1.0 / tl.sqrt_rn(tl.sum(x * x, 1, keep_dims=True) / DIM + eps)


@triton.jit
def _normed(x, factor, q_weight_ptr, k_weight_ptr, dims, is_q, is_k, DTYPE: tl.constexpr):
    """x times factor and weight, rounded to DTYPE, as it is where norm and rotation are two operations; 0 for values."""
    q_weight = tl.load(q_weight_ptr + dims, is_q, 0.0).to(tl.float32)
    weight = q_weight + tl.load(k_weight_ptr + dims, is_k, 0.0).to(tl.float32)
    return (x * factor * weight).to(DTYPE).to(tl.float32)


@triton.jit
def _quantise(rows):
    """Rows [HEADS, BLOCK] as int8, and the scales [HEADS, 1]; that of a row with a NaN makes NaN of all of it again."""
    peak = tl.max(tl.abs(rows), 1, keep_dims=True)
    scaled = rows * tl.minimum(tl.div_rn(127.0, peak), _LARGEST)
    whole = tl.where(scaled == scaled, (scaled + _WHOLE) - _WHOLE, 0.0).to(tl.int8)
    is_nan = tl.max((rows != rows).to(tl.int32), 1, keep_dims=True) > 0
    return whole, tl.where(is_nan, float("nan"), tl.div_rn(peak, 127.0))


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
    pool_position_stride,
    pool_head_stride,
    scales_block_stride,
    scales_position_stride,
    scales_head_stride,
    block_size,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program for HEADS heads of a token, which may be of all three kinds."""
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
        # Each element and the one it is turned with, which lies half the turned dimensions away.
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
    block, position = slot // block_size, slot % block_size
    rows = tl.where(is_v, raw, x.to(raw.dtype))
    kv_head = tl.where(head < NUM_HEADS + NUM_KV_HEADS, head - NUM_HEADS, head - NUM_HEADS - NUM_KV_HEADS)
    if HAS_SCALES:
        rows, scale = _quantise(rows.to(tl.float32))
        at = block * scales_block_stride + position * scales_position_stride + kv_head * scales_head_stride
        tl.store(k_scales_ptr + at, scale, is_k)
        tl.store(v_scales_ptr + at, scale, is_v)
    at = block * pool_block_stride + position * pool_position_stride + kv_head * pool_head_stride + dim
    tl.store(k_pool_ptr + at, rows, is_k & inside)
    tl.store(v_pool_ptr + at, rows, is_v & inside)
