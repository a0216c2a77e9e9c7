"""Products with a matrix of codes: decoded tile by tile for few rows, and once for many.

A decode step is bound by the bytes of its matrices, of which codes have a quarter or half. With many rows each program
would decode the same tiles again, so the matrix is decoded to memory, and torch multiplies. Engine thread.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
import triton
import triton.language as tl
from torch import Tensor

from engine.runtime.cuda.experts import choose_dense_tile, multiply
from engine.runtime.cuda.packed import Rows, block_of, load_weights, scale_rows

MOST_ROWS = 128  # that the kernel multiplies. To be measured on a GPU.
_OUTPUTS = 32  # rows of a matrix that a program decodes


class PackedProduct:
    """y = x W^T + b in x's type; a Product."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, outputs] of x [T, inputs]."""
        rows = self.rows
        if len(x) > MOST_ROWS:
            return F.linear(x, decode(rows, x.dtype), rows.bias)
        out = torch.empty((len(x), len(rows.numbers)), dtype=x.dtype, device=x.device)
        multiply(x, rows, out, choose_dense_tile(rows, len(x), x.itemsize))
        return out


def decode(rows: Rows, dtype: torch.dtype) -> Tensor:
    """Return the weight [outputs, inputs] as floats of `dtype`."""
    num_outputs, num_inputs = len(rows.numbers), rows.num_inputs
    out = torch.empty((num_outputs, num_inputs), dtype=dtype, device=rows.numbers.device)
    block = block_of(rows, 128)
    _decode_rows[(triton.cdiv(num_outputs, _OUTPUTS), num_inputs // block)](
        rows.numbers,
        rows.scales,
        rows.zeros,
        out,
        OUTPUTS=num_outputs,
        INPUTS=num_inputs,
        NUM_GROUPS=rows.num_groups,
        GROUP=rows.group,
        ZERO=rows.zero,
        KIND=rows.kind,
        BLOCK_N=_OUTPUTS,
        BLOCK_K=block,
        num_warps=4,
    )
    return out


@triton.jit
def _decode_rows(
    numbers_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program for a tile."""
    outputs, start = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1) * BLOCK_K
    rows = tl.minimum(outputs, OUTPUTS - 1).to(tl.int64)
    weight = load_weights(
        numbers_ptr, scales_ptr, zeros_ptr, rows, start, tl.float32, INPUTS, NUM_GROUPS, GROUP, ZERO, KIND, BLOCK_K
    )
    weight = tl.trans(scale_rows(tl.trans(weight), scales_ptr, rows, NUM_GROUPS))
    to = out_ptr + (rows * INPUTS)[:, None] + start + tl.arange(0, BLOCK_K)[None, :]
    tl.store(to, weight.to(out_ptr.dtype.element_ty), mask=(outputs < OUTPUTS)[:, None])
