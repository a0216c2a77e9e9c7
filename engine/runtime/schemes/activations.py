"""Activations of gates and ups: Triton kernels on CUDA, else torch. Engine thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from engine.runtime.activation import Activation
from engine.runtime.cuda.available import uses_triton

_TORCH_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
}


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Return the activation of x."""
    return _TORCH_ACTIVATIONS[activation](x)


def act_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_up [T, 2 * width], gates first -> activation(gates) * ups, [T, width]; without gates the width stays."""
    if not activation.is_gated:
        return gate_up.relu().square_()
    if uses_triton(gate_up):
        from engine.runtime.cuda import activation as kernel

        return kernel.act_mul(gate_up, activation)
    gates, ups = gate_up.chunk(2, dim=1)
    return _TORCH_ACTIVATIONS[activation](gates).mul_(ups)


def clamped_mul(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """Return gpt-oss's activation of [T, 2 * width], gates first; the gate has no lower bound."""
    gates, ups = gate_up.float().chunk(2, dim=-1)
    gates, ups = gates.clamp(max=limit), ups.clamp(-limit, limit)
    return ((ups + 1) * gates * (gates * alpha).sigmoid()).to(gate_up.dtype)
