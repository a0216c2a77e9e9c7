"""The inner step of both attention kernels: load a tile of keys, score it, add its values.

Softmax is online and in base 2 with float32 accumulators. The pool's layout is that of store.py. Over a narrow pool
(int8, fp8) products are in float16, which represents all numbers of both types exactly; converting to it takes half an
instruction a number, where bfloat16 takes several. A row's scale is applied to its score, or to its weight. Device
code.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Of float32 products: three in tensor cores, which lose two or three bits instead of thirteen. In full precision there
# are no tensor cores for them, and a tile's numbers do not fit a program's registers.
PRECISION = tl.constexpr("tf32x3")
_BIAS = tl.constexpr(127)  # of float32's exponent
_LARGEST_QUERY = tl.constexpr(
    14
)  # exponent that queries are scaled to, as large as float16 and sums of 256 products allow
# Exponent below which a row of values counts as this small. Its weight can then not overflow the sum of the weights.
_SMALLEST_VALUE = tl.constexpr(-60)


@triton.jit
def widen(numbers, kind: tl.constexpr, dtype: tl.constexpr):
    """The low byte of each of `numbers`, unsigned integers, as a number of `kind` in `dtype`."""
    if kind == tl.int8 and dtype == tl.float16:
        # 0x6400 is 1024 in float16, whose last bit counts 1. Instructions that convert integers are a quarter as fast.
        wide = ((numbers.to(tl.uint16) & 0xFF) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
    else:
        wide = numbers.to(tl.uint8).to(kind, bitcast=True).to(dtype)
    return wide


@triton.jit
def load_rows(pool, rows, dims, HEAD_DIM: tl.constexpr, dtype: tl.constexpr):
    """Return rows [N, dims] of K or V that begin `rows` [N] elements into the pool.

    Dimensions after HEAD_DIM are zero. Rows of a narrow pool are converted to `dtype`.
    """
    kind: tl.constexpr = pool.dtype.element_ty
    if dims.shape[0] == HEAD_DIM:
        tile = tl.load(pool + rows[:, None] + dims[None, :])
    else:
        tile = tl.load(pool + rows[:, None] + dims[None, :], mask=(dims < HEAD_DIM)[None, :], other=0.0)
    if kind.primitive_bitwidth == 8:
        tile = widen(tile.to(tl.uint8, bitcast=True), kind, dtype)
    return tile


@triton.jit
def locate(table, keys, end, block_stride, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return where the keys' rows begin in the pool, and their scales in a narrow one.

    Keys after `end` repeat the last key, which is cheaper than a mask and reads nothing stale.
    """
    at = tl.minimum(keys, end - 1).to(tl.uint32)
    blocks = tl.load(table + at // BLOCK_SIZE).to(tl.int64) * block_stride
    offsets = at % BLOCK_SIZE
    return blocks + offsets * HEAD_DIM, (blocks + BLOCK_SIZE * HEAD_DIM) // 4 + offsets


@triton.jit
def exponent_of(x):
    """Return floor(log2(x)) of a non-negative float32; 128 for NaN and infinity."""
    return (x.to(tl.int32, bitcast=True) >> 23) - _BIAS


@triton.jit
def power_of_two(exponent):
    """2 ** exponent as float32, from -126 to 127."""
    return ((exponent + _BIAS) << 23).to(tl.float32, bitcast=True)


@triton.jit
def to_half(q, scale):
    """Return queries as float16, scaled to fit, and the factor for their products."""
    exponent = tl.maximum(exponent_of(tl.max(tl.abs(q.to(tl.float32)))), -100) - _LARGEST_QUERY
    return (q.to(tl.float32) * power_of_two(-exponent)).to(tl.float16), scale * power_of_two(exponent)


@triton.jit
def soft_cap(scores, cap):
    """Return cap * tanh(scores / cap); the exponential may overflow: 2 / (inf + 1) is 0."""
    return cap - cap * 2.0 / (tl.exp2(scores * (2.0 * LOG2E / cap)) + 1.0)


@triton.jit
def add_values(
    weights, decay, acc, odd, v_pool, rows, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, IN_PAIRS: tl.constexpr
):
    """Add a tile's weighted values to `acc`; with IN_PAIRS odd ones go to `odd`.

    Products of few rows need their second operand transposed, which shared memory can do with 16-bit numbers but not
    with 8-bit ones. So two adjacent bytes are loaded as one number, and the even and the odd ones have a product each.
    """
    dtype: tl.constexpr = weights.dtype
    acc *= decay
    if IN_PAIRS:
        kind: tl.constexpr = v_pool.dtype.element_ty
        pairs = v_pool.to(tl.pointer_type(tl.uint16), bitcast=True)
        v = load_rows(pairs, rows // 2, tl.arange(0, BLOCK_D // 2), HEAD_DIM // 2, dtype)
        odd = tl.dot(weights, widen(v >> 8, kind, dtype), odd * decay, input_precision=PRECISION)
        acc = tl.dot(weights, widen(v, kind, dtype), acc, input_precision=PRECISION)
    else:
        v = load_rows(v_pool, rows, tl.arange(0, BLOCK_D), HEAD_DIM, dtype)
        acc = tl.dot(weights, v, acc, input_precision=PRECISION)
    return acc, odd


@triton.jit
def attend_keys(
    q,  # [BLOCK_M, BLOCK_D]
    q_at,  # [BLOCK_M] positions
    peak,  # [BLOCK_M] highest exponent so far, in base 2: of a score, times the size of the value in a narrow pool
    total,  # [BLOCK_M] sum of weights, relative to the peak
    acc,  # [BLOCK_M, BLOCK_D] weighted values, likewise
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
    IS_MASKED: tl.constexpr,  # whether a row may see only some of these keys
    IN_PAIRS: tl.constexpr,  # whether one-byte values are loaded as pairs
):
    """Attend over the keys, one tile at a time; returns the new peak, total and acc."""
    is_narrow: tl.constexpr = k_scales is not None
    dtype: tl.constexpr = tl.float16 if is_narrow and q.dtype != tl.float32 else q.dtype
    scale *= LOG2E
    softcap *= LOG2E
    if dtype != q.dtype:
        q, scale = to_half(q, scale)
    odd = 0.0
    if IN_PAIRS:
        acc, odd = tl.split(tl.reshape(acc, [acc.shape[0], BLOCK_D // 2, 2]))
    last = tl.minimum(q_at, end - 1)
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        rows, scales_at = locate(table, keys, end, block_stride, HEAD_DIM, BLOCK_SIZE)
        k = load_rows(k_pool, rows, tl.arange(0, BLOCK_D), HEAD_DIM, dtype)
        key_scale = scale
        if is_narrow:
            key_scale = (tl.load(k_scales + scales_at) * scale)[None, :]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * key_scale
        if HAS_SOFTCAP:
            scores = soft_cap(scores, softcap)
        if is_narrow:
            # Weights that include the power of two of their value's scale fit the range of float16 for any scales: the
            # largest is near 1. `total` counts them without it.
            v_scale = tl.load(v_scales + scales_at)
            exponents = tl.maximum(exponent_of(v_scale), _SMALLEST_VALUE)
            inverse = power_of_two(-exponents)
            scores += exponents.to(tl.float32)[None, :]
        if IS_MASKED:
            is_visible = keys[None, :] <= last[:, None]
            if WINDOW > 0:
                is_visible &= keys[None, :] > q_at[:, None] - WINDOW
            scores = tl.where(is_visible, scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A row whose window begins after this tile has seen no key yet: avoid -inf - -inf.
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(peak - base)
        if is_narrow:
            total = total * decay + tl.sum(weights * inverse[None, :], 1)
            weights *= (v_scale * inverse)[None, :]
        else:
            total = total * decay + tl.sum(weights, 1)
        acc, odd = add_values(weights.to(dtype), decay[:, None], acc, odd, v_pool, rows, HEAD_DIM, BLOCK_D, IN_PAIRS)
        peak = new_peak
    if IN_PAIRS:
        acc = tl.reshape(tl.join(acc, odd), [acc.shape[0], BLOCK_D])
    return peak, total, acc


@triton.jit
def add_sink(peak, total, acc, sink):
    """Add one score a row, in base 2, without a value."""
    new_peak = tl.maximum(peak, sink)
    decay = tl.exp2(peak - new_peak)
    return new_peak, total * decay + tl.exp2(sink - new_peak), acc * decay[:, None]
