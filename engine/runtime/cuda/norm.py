"""Adds to the residual stream and normalises it, in one pass over memory.

The CUDA version of native/ops.py, with the same roundings. Engine thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def add_rms_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, alpha: float = 1.0) -> Tensor:
    """Add alpha * delta to residual [T, width] in place; return its RMSNorm times weight.

    Rows need not be adjacent; `weight` [width] is of the residual's type or float32. Sums are in float32.
    """
    num_rows, width = residual.shape
    assert residual.stride(1) == 1
    assert weight.shape == (width,)
    assert weight.is_contiguous()
    added = residual if delta is None else delta
    assert added.shape == residual.shape
    assert added.stride(1) == 1
    out = torch.empty((num_rows, width), dtype=residual.dtype, device=residual.device)
    if num_rows == 0:
        return out
    block = triton.next_power_of_2(width)
    _add_rms_norm[(num_rows,)](
        residual,
        added,
        weight,
        out,
        residual.stride(0),
        added.stride(0),
        width,
        eps,
        alpha,
        HAS_DELTA=delta is not None,
        BLOCK=block,
        # 16 values a thread: two loads of 16 bytes in bfloat16. To be tuned on a GPU, with 8 and 32.
        num_warps=min(max(block // 512, 1), 16),
    )
    return out


@triton.jit
def _add_rms_norm(
    residual_ptr,
    delta_ptr,
    weight_ptr,
    out_ptr,
    residual_stride,
    delta_stride,
    width,
    eps,
    alpha,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each row, held in registers."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    residual_at = residual_ptr + row * residual_stride + column
    x = tl.load(residual_at, inside, 0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row * delta_stride + column, inside, 0.0)
        # Rounded to the stream's type before it is normalised, as readers of the stream see it.
        x = (x.to(tl.float32) + alpha * delta.to(tl.float32)).to(x.dtype)
        tl.store(residual_at, x, inside)
    wide = x.to(tl.float32)
    factor = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / width + eps)
    weight = tl.load(weight_ptr + column, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, wide * factor * weight, inside)
