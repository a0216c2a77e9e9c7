"""Linears in fp8: weight and inputs as e4m3 with a float32 scale a row, on tensor cores.

A weight's scales, one an output, are computed when it is loaded; those of the inputs, one a token, in every call by a
small kernel. A row's scale maps its largest number to the largest of e4m3, so nothing is calibrated and nothing is
clipped. torch._scaled_mm applies both scales to sums in float32 and rounds once, to bfloat16. Engine thread.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

_PEAK = tl.constexpr(448.0)  # the largest number of e4m3
_MAX = tl.constexpr(3.4028234663852886e38)


class Fp8Linear:
    """y = x W^T + b in bfloat16, with a weight in float8_e4m3fn that is filled row by row."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        assert weight.is_contiguous()
        self.weight, self.bias = weight, bias
        self.scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)

    def load(self, first_row: int, num_rows: int, copy_to: Callable[[Tensor], None]) -> None:
        """Quantise the rows from `first_row` on, which `copy_to` writes in bfloat16."""
        rows = torch.empty((num_rows, self.weight.shape[1]), dtype=torch.bfloat16, device=self.weight.device)
        copy_to(rows)
        end = first_row + num_rows
        quantise_rows(rows, self.weight[first_row:end], self.scales[first_row:end])

    def store(self, first_row: int, numbers: Tensor, scales: Tensor) -> None:
        """Copy rows that are stored in fp8, with scales [rows, 1] or one for all [1, 1]."""
        end = first_row + len(numbers)
        self.weight[first_row:end].copy_(numbers)
        self.scales[first_row:end].copy_(scales.expand(len(numbers), 1)[:, 0])

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, outputs] bfloat16 of x [T, inputs] bfloat16."""
        numbers = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
        scales = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
        quantise_rows(x, numbers, scales)
        return torch._scaled_mm(  # noqa: SLF001 - torch's only product of fp8
            numbers,
            self.weight.t(),
            scale_a=scales,
            scale_b=self.scales[None, :],
            bias=self.bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )


def quantise_rows(x: Tensor, numbers: Tensor, scales: Tensor) -> None:
    """Write x [T, width] as `numbers` [T, width] float8_e4m3fn times `scales`, T float32.

    Rows of x need not be adjacent. A row of zeros has a scale of 0; NaN stays NaN, and infinity turns its row into NaN.
    """
    num_rows, width = x.shape
    assert x.stride(1) == 1
    assert numbers.shape == x.shape
    assert numbers.is_contiguous()
    assert scales.is_contiguous()
    assert scales.numel() == num_rows
    if num_rows == 0:
        return
    block = triton.next_power_of_2(width)
    _quantise_rows[(num_rows,)](
        x,
        numbers,
        scales,
        x.stride(0),
        width,
        BLOCK=block,
        # 16 values a thread, as in norm.py. To be tuned on a GPU.
        num_warps=min(max(block // 512, 1), 16),
    )


@triton.jit
def _quantise_rows(x_ptr, numbers_ptr, scales_ptr, x_stride, width, BLOCK: tl.constexpr):
    """One program for each row, held in registers."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * x_stride + column, inside, 0.0).to(tl.float32)
    peak = tl.max(tl.abs(x), 0)
    factor = tl.minimum(tl.div_rn(_PEAK, peak), _MAX)  # infinite for a row of zeros
    tl.store(numbers_ptr + row * width + column, (x * factor).to(tl.float8e4nv), inside)
    tl.store(scales_ptr + row, tl.div_rn(peak, _PEAK))
