"""Mamba-2 (Granite 4, Nemotron-H): a matrix for each head, which decays, and to which each token adds a product.

A token's projection is [gate z | x of all heads, B and C of all groups | dt]. A convolution over the last tokens and SiLU
change the second part; then for each head, in float32 and token by token, whatever the chunks, with B and C of its group:

    dt = softplus(dt + bias)      S = exp(A dt) S + B (dt x)'      y = S' C + D x

A norm over each group's heads follows, of y silu(z). The torch operations here define the arithmetic; mamba.c has the
same, in one order, and cuda/recurrence.py for GPUs. Engine thread.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

from engine.runtime.cuda.available import uses_triton
from engine.runtime.kv_layout import DeviceState
from engine.runtime.layers.model_config import MambaConfig, ModelConfig
from engine.runtime.layers.parts import AdaptedMatrix, Angles, LayerAdapters, LayerStates, Load, Maker, adapted, summed
from engine.runtime.layers.recurrence import Rule, advance, convolved, matrix_state, recurrence_args
from engine.runtime.layers.shards import Plan, colwise, rowwise
from engine.runtime.native.library import PartArgs
from engine.runtime.native.parts import describe_part
from engine.runtime.native.structs import structure

_CHANNELS = ("mamba_values", "mamba_groups", "mamba_groups")
_PLAN: Plan = {
    "in_proj": colwise("mamba_values", *_CHANNELS, "mamba_heads"),
    "conv1d": colwise(*_CHANNELS),
    "conv1d.bias": colwise(*_CHANNELS),
    "A_log": colwise("mamba_heads"),
    "D": colwise("mamba_heads"),
    "dt_bias": colwise("mamba_heads"),
    "norm": colwise("mamba_values"),
    "out_proj": rowwise("mamba_values"),
}
MambaArgs = structure("mamba")  # what the native library needs beside the first matrix and the last


class Mamba2:
    """A gate, inputs of the state and steps of x; a convolution, the recurrence, a gated norm, a projection."""

    def __init__(self, config: ModelConfig, layer: int, make: Maker, state: int) -> None:
        make, mamba = make.within("mamba", plan=_PLAN), config.layers[layer].recurrent
        assert isinstance(mamba, MambaConfig), "the family has sizes of the matrices"
        self._state, self._mamba, self._eps, self._group = state, mamba, config.norm_eps, make.group
        self._widths = (mamba.width, mamba.channels, mamba.num_heads)
        rows = {"in_proj": sum(self._widths)}
        self._in = make.linear(rows, config.hidden_size, bias=mamba.has_bias, place=AdaptedMatrix.QKV)
        self._conv = make.tensor("conv1d.weight", mamba.channels, 1, mamba.kernel, dtype=torch.float32)
        self._conv_bias = (
            make.tensor("conv1d.bias", mamba.channels, dtype=torch.float32) if mamba.has_conv_bias else None
        )
        self._rates = make.tensor("A_log", mamba.num_heads, dtype=torch.float32)
        make.loads.append(Load({}, self._complete))
        self._skip = make.tensor("D", mamba.num_heads, dtype=torch.float32)
        self._bias = make.tensor("dt_bias", mamba.num_heads, dtype=torch.float32)
        self._norm = make.tensor("norm.weight", mamba.width, dtype=torch.float32) if mamba.has_norm else None
        self._o = make.linear({"out_proj": config.hidden_size}, mamba.width, bias=mamba.has_bias, place=AdaptedMatrix.O)
        sizes = (mamba.num_heads, mamba.state_dim, mamba.head_dim, mamba.channels, mamba.kernel, sum(self._widths))
        self.states = (matrix_state(make, *sizes),)

    def _complete(self, _: object) -> None:
        """Make decay rates, and taps that scale the convolution's inputs."""
        self._rates.exp_().neg_()
        groups = self._mamba.num_groups * self._mamba.state_dim
        scales = torch.tensor(self._mamba.scales[1:4]).repeat_interleave(
            torch.tensor([self._mamba.width, groups, groups])
        )
        self._conv.mul_(scales[:, None, None].to(self._conv.device))

    def __call__(
        self,
        x: Tensor,
        angles: Angles | None,  # noqa: ARG002 - only the order of tokens counts here
        attention: LayerStates,
        adapters: LayerAdapters | None = None,
    ) -> Tensor:
        rows, state = adapted(self._in, AdaptedMatrix.QKV, x, adapters), attention.recurrent(self._state)
        (width, channels, num_heads), scales = self._widths, self._mamba.scales
        for part, scale in ((rows[:, :width], scales[0]), (rows[:, -num_heads:], scales[4])):
            if scale != 1.0:
                part.mul_(scale)
        if uses_triton(x):
            mixed = self._by_kernels(rows, state.on_device)
        else:
            outputs = [
                advance(
                    state, index, piece, rows[piece.first : piece.stop], num_heads=num_heads,
                    channels=slice(width, width + channels), prepare=self._prepare,
                )
                for index, piece in enumerate(state.slices)
            ]  # fmt: skip
            mixed = self._gated(torch.cat(outputs), rows)
        return summed(self._o, AdaptedMatrix.O, mixed, adapters, self._group)

    def _by_kernels(self, rows: Tensor, state: DeviceState) -> Tensor:
        from engine.runtime.cuda.recurrence import Weights, advance, gated_norm
        from engine.runtime.cuda.recurrence_state import Sizes

        mamba, (width, _, num_heads) = self._mamba, self._widths
        heads = (mamba.num_groups, num_heads, mamba.state_dim, mamba.head_dim)
        sizes = Sizes(*heads, mamba.kernel, mamba.shared, inputs=width, is_delta=False)
        weights = Weights(self._conv, self._rates, self._bias, self._conv_bias, self._skip, mamba.step_limit)
        out = advance(rows, state, sizes, weights)
        if mamba.num_sharing > 1 or self._norm is None:
            return self._gated(out, rows)
        return gated_norm(out, rows[:, :width], self._norm, sizes, self._eps)

    def _prepare(self, rows: Tensor, raw: Tensor) -> Rule:
        """Return the recurrence for some rows."""
        mamba = self._mamba
        groups = mamba.num_groups * mamba.state_dim
        x, b, c = convolved(raw, self._conv, self._conv_bias).split((mamba.width, groups, groups), 1)
        x = x.unflatten(1, (-1, mamba.head_dim))
        b, c = (each.unflatten(1, (mamba.num_groups, -1)).repeat_interleave(mamba.shared, 1) for each in (b, c))
        dt = F.softplus(rows[:, -mamba.num_heads :].float() + self._bias).clamp(*mamba.step_limit)
        decay, skipped = (self._rates * dt).exp(), x * self._skip[:, None]
        change = x * dt[:, :, None]

        def rule(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
            s = s * decay[t, :, None, None] + b[t, :, :, None] * change[t, :, None]
            return s, torch.einsum("hkv,hk->hv", s, c[t]) + skipped[t]

        return rule

    def _gated(self, out: Tensor, rows: Tensor) -> Tensor:
        """Return gated outputs [T, width], or their norms by groups; ranks that share the one group sum its squares."""
        gated = out.flatten(1) * F.silu(rows[:, : self._mamba.width].float())
        if self._norm is None:
            return gated.to(rows.dtype)
        groups = gated.unflatten(1, (self._mamba.num_groups, -1))
        squares = groups.square().sum(-1, keepdim=True)
        if self._mamba.num_sharing > 1:
            self._group.all_reduce(squares)
        scales = torch.rsqrt(squares / (groups.shape[2] * self._mamba.num_sharing) + self._eps)
        return ((groups * scales).flatten(1) * self._norm).to(rows.dtype)

    def describe(self) -> PartArgs | None:
        mamba = self._mamba
        self._taps = self._conv[:, 0].mT.contiguous()  # [kernel, channels], as C reads them
        heads = {"num_heads": mamba.num_heads, "num_k_heads": mamba.num_groups, "shared": mamba.shared}
        sizes = recurrence_args(self.states[0], self._taps, self._conv_bias, **heads)
        if sizes is None:
            return None
        addresses = [each.data_ptr() for each in (self._rates, self._bias, self._skip)]
        norm, num_sharing = (None, 1) if self._norm is None else (self._norm.data_ptr(), mamba.num_sharing)
        ends = (mamba.scales[0], mamba.scales[4])
        self._args = MambaArgs(sizes, *addresses, norm, *mamba.step_limit, *ends, num_sharing)  # C keeps its address
        return describe_part("mamba", (self._in.args, self._o.args), self._args)
