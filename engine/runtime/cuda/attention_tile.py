"""What both attention kernels do with a tile of keys: gather it through the block table, score it, weigh the values.

Softmax is online and in base 2 with float32 accumulators. The pool lies as store.py says; the numbers of a narrow one go
into the products as they are, and their scales to the scores and the weights. Device code: it knows no slices.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Of float32 products: three in tensor cores, which lose two or three bits instead of thirteen. In full precision there are
# no tensor cores for them, and a tile's numbers do not fit a program's registers.
PRECISION = tl.constexpr("tf32x3")


@triton.jit
def load_rows(pool, rows, is_key, dims, HEAD_DIM: tl.constexpr, DTYPE: tl.constexpr):
    """Rows of K or V that begin `rows` [N] elements into the pool: [N, BLOCK_D] of DTYPE, zero where there is nothing.

    What is masked is never read, so nothing stale in the pool can reach a result, not even as 0 * NaN.
    """
    tile = tl.load(pool + rows[:, None] + dims[None, :], mask=is_key[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    return tile.to(DTYPE)


@triton.jit
def soft_cap(scores, cap):
    """cap * tanh(scores / cap), by an exponential that may overflow: 2 / (inf + 1) is the right 0."""
    return cap - cap * 2.0 / (tl.exp2(scores * (2.0 * LOG2E / cap)) + 1.0)


@triton.jit
def attend_keys(
    q,  # [BLOCK_M, BLOCK_D]
    q_at,  # [BLOCK_M] positions
    peak,  # [BLOCK_M] highest score so far, in base 2
    total,  # [BLOCK_M] sum of weights, relative to the peak
    acc,  # [BLOCK_M, BLOCK_D] weighed values, likewise
    begin,  # key positions begin .. end - 1; begin at a tile's start
    end,
    table,  # the sequence's blocks
    k_pool,  # of the kv head
    v_pool,
    k_scales,
    v_scales,
    block_stride,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_MASKED: tl.constexpr,  # whether a row may not see all of these keys
):
    """Go over the keys, a tile at a time; returns peak, total and acc with them."""
    dims = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        is_key = keys < end
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64) * block_stride
        offsets = keys % BLOCK_SIZE
        rows = blocks + offsets * HEAD_DIM
        scales_at = (blocks + BLOCK_SIZE * HEAD_DIM) // 4 + offsets
        k = load_rows(k_pool, rows, is_key, dims, HEAD_DIM, q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if k_scales is not None:
            scores *= tl.load(k_scales + scales_at, mask=is_key, other=0.0)[None, :]
        if HAS_SOFTCAP:
            scores = soft_cap(scores, softcap)
        scores *= LOG2E
        if IS_MASKED:
            is_visible = (keys[None, :] <= q_at[:, None]) & is_key[None, :]
            if WINDOW > 0:
                is_visible &= keys[None, :] > q_at[:, None] - WINDOW
            scores = tl.where(is_visible, scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A row whose window begins behind this tile has seen nothing yet: keep -inf - -inf out of it.
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(peak - base)
        total = total * decay + tl.sum(weights, 1)
        if v_scales is not None:
            weights *= tl.load(v_scales + scales_at, mask=is_key, other=0.0)[None, :]
            # float16 has no room for a small weight of a small value.
            v = load_rows(v_pool, rows, is_key, dims, HEAD_DIM, tl.bfloat16 if q.dtype == tl.float16 else q.dtype)
        else:
            v = load_rows(v_pool, rows, is_key, dims, HEAD_DIM, q.dtype)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
        peak = new_peak
    return peak, total, acc


@triton.jit
def add_sink(peak, total, acc, sink):
    """One more score a row, in base 2, that carries no value."""
    new_peak = tl.maximum(peak, sink)
    decay = tl.exp2(peak - new_peak)
    return new_peak, total * decay + tl.exp2(sink - new_peak), acc * decay[:, None]
