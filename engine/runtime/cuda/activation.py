"""The gated activations of an MLP, each in one pass: act(gate) * up. Engine thread."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.runtime.activation import Activation

_BLOCK = 1024  # 8 values a thread, a load of 16 bytes in bfloat16. To be tuned on a GPU.


NAMES = {Activation.SILU: "silu", Activation.GELU: "gelu", Activation.GELU_TANH: "gelu_tanh"}


def act_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return act(gate) * up [T, width] of gate_up [T, 2 * width], rounded once from float32."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        grid = (num_rows, triton.cdiv(width, _BLOCK))
        _act_mul_kernel[grid](
            gate_up, out, gate_up.stride(0), width, ACTIVATION=NAMES[activation], BLOCK=_BLOCK, num_warps=4
        )
    return out


@triton.jit
def share_of(gate, ACTIVATION: tl.constexpr):
    """Return the factor of float32 gates: activation(gate) = gate * factor."""
    if ACTIVATION == "silu":
        share = tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        share = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # (1 + tanh(y)) / 2 is the sigmoid of 2 y.
        tl.static_assert(ACTIVATION == "gelu_tanh")
        share = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return share


@triton.jit
def _act_mul_kernel(in_ptr, out_ptr, in_stride, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """A program for BLOCK columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate_at = in_ptr + row * in_stride + column
    gate = tl.load(gate_at, inside, 0.0).to(tl.float32)
    up = tl.load(gate_at + width, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, gate * share_of(gate, ACTIVATION) * up, inside)
