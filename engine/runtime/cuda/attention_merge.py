"""Merges the partial results of a context that several programs computed (device code).

A part has the weighted mean of its values and the base 2 logarithm of the sum of its weights. A part in which a row
sees no key, such as outside a window, has -inf there and weight 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.runtime.cuda.attention_tile import LOG2E, add_sink

_AT_ONCE = tl.constexpr(16)


@triton.jit
def merge_row(
    to,  # where the row of `head` in the result begins
    partial,  # [entries, HEAD_DIM] float32
    partial_lse,  # [entries] float32
    entry,  # int64, of the row's first part ...
    stride,  # ... and how many entries on the next one is
    num_parts,  # 0 for a padding row, whose result is zero
    sinks,
    head,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge one row's parts, a fixed number at a time, and the sink if there is one."""
    dims = tl.arange(0, BLOCK_D)
    peak = tl.full([1], -float("inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    for start in range(0, num_parts, _AT_ONCE):
        parts = start + tl.arange(0, _AT_ONCE)
        is_part = parts < num_parts
        entries = entry + parts * stride
        lse = tl.load(partial_lse + entries, mask=is_part, other=-float("inf"))
        mask = is_part[:, None] & (dims < HEAD_DIM)[None, :]
        rows = tl.load(partial + entries[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)  # avoids -inf - -inf
        weights = tl.exp2(lse - base)
        decay = tl.exp2(peak - base)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay[:, None] + tl.sum(rows * weights[:, None], 0)[None, :]
        peak = new_peak
    if sinks is not None:
        peak, total, acc = add_sink(peak, total, acc, tl.load(sinks + head).to(tl.float32) * LOG2E)
    result = tl.where(num_parts > 0, acc / total[:, None], 0.0)
    tl.store(to + dims[None, :], result.to(to.dtype.element_ty), mask=(dims < HEAD_DIM)[None, :])
