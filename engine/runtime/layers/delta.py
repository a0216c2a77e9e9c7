"""Gated DeltaNet (Qwen3-Next, Qwen3.5): a matrix for each value head, which every token changes by a delta rule.

A token's projection is [queries, keys, values | gates z | b | a]. A convolution over the last tokens and SiLU change the
first part; then, with unit queries and keys, for each head, in float32 and token by token, whatever the chunks:

    S = exp(g) S        S += k (beta (v - S' k))'        o = S' q        y = norm(o) silu(z)

The torch operations here define the arithmetic; delta.c has the same, in one order, and cuda/recurrence.py for GPUs. Engine
thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from numpy.typing import NDArray
from torch import Tensor

from engine.runtime.cuda.available import uses_triton
from engine.runtime.kv_layout import DeviceState
from engine.runtime.layers.model_config import DeltaConfig, ModelConfig
from engine.runtime.layers.parts import AdaptedMatrix, Angles, LayerAdapters, LayerStates, Load, Maker, adapted, summed
from engine.runtime.layers.recurrence import Rule, advance, convolved, matrix_state, recurrence_args
from engine.runtime.layers.shards import Plan, colwise, rowwise
from engine.runtime.native.library import LinearArgs, PartArgs
from engine.runtime.native.parts import describe_part
from engine.runtime.native.structs import structure

_EPS = 1e-6  # of unit queries and keys
_PLAN: Plan = {
    "in_proj_qkv": colwise("delta_keys", "delta_keys", "delta_values"),
    "in_proj_z": colwise("delta_values"),
    "in_proj_b": colwise("delta_heads"),
    "in_proj_a": colwise("delta_heads"),
    "in_proj_qkvz": colwise("delta_groups"),
    "in_proj_ba": colwise("delta_groups"),
    "conv1d": colwise("delta_keys", "delta_keys", "delta_values"),
    "A_log": colwise("delta_heads"),
    "dt_bias": colwise("delta_heads"),
    "out_proj": rowwise("delta_values"),
}
DeltaArgs = structure("delta")  # what the native library needs beside the first matrix and the last


class DeltaNet:
    """Queries, keys, values and gates of x; a convolution, the delta rule, a gated norm, a projection."""

    _order: Tensor  # of a row's numbers by parts, in a fused row

    def __init__(self, config: ModelConfig, layer: int, make: Maker, state: int) -> None:
        make, delta = make.within("linear_attn", plan=_PLAN), config.layers[layer].recurrent
        assert isinstance(delta, DeltaConfig), "the family has sizes of the matrices"
        self._state, self._delta, self._eps, self._group = state, delta, config.norm_eps, make.group
        width = delta.num_v_heads * delta.v_dim
        rows = {"in_proj_qkv": delta.channels, "in_proj_z": width}
        gates = {"in_proj_b": delta.num_v_heads, "in_proj_a": delta.num_v_heads}
        self._widths, self._moves = (*rows.values(), *gates.values()), _moves(delta)
        if delta.has_fused_rows:
            rows = {"in_proj_qkvz": sum(rows.values())}
        if delta.has_fused_gates:
            gates = {"in_proj_ba": sum(gates.values())}
        if self._moves is not None:
            order = np.argsort(np.concatenate([to + np.arange(num) for _, to, num in self._moves]))
            self._order = torch.from_numpy(order).to(make.device)
        self._in = make.linear(rows, config.hidden_size, place=AdaptedMatrix.QKV)
        # Checkpoints often leave these as floats: in one matrix with the others, all would be.
        self._gates = make.linear(gates, config.hidden_size, place=AdaptedMatrix.Q_B)
        self._conv = make.tensor("conv1d.weight", delta.channels, 1, delta.kernel, dtype=torch.float32)
        self._decay = make.tensor("A_log", delta.num_v_heads, dtype=torch.float32)
        make.loads.append(Load({}, lambda _: self._decay.exp_().neg_()))
        self._bias = make.tensor("dt_bias", delta.num_v_heads, dtype=torch.float32)
        self._norm = make.tensor("norm.weight", delta.v_dim, dtype=torch.float32)
        self._o = make.linear({"out_proj": config.hidden_size}, width, place=AdaptedMatrix.O)
        if delta.is_tiled and make.shards is None:
            _reorder(delta, make)
        sizes = (delta.num_v_heads, delta.k_dim, delta.v_dim, delta.channels, delta.kernel, sum(self._widths))
        self.states = (matrix_state(make, *sizes),)

    def __call__(
        self,
        x: Tensor,
        angles: Angles | None,  # noqa: ARG002 - only the order of tokens counts here
        attention: LayerStates,
        adapters: LayerAdapters | None = None,
    ) -> Tensor:
        rows, state = adapted(self._in, AdaptedMatrix.QKV, x, adapters), attention.recurrent(self._state)
        rows = torch.cat((rows, adapted(self._gates, AdaptedMatrix.Q_B, x, adapters)), 1)
        if self._moves is not None:
            rows = rows.index_select(1, self._order)
        if uses_triton(x):
            mixed = self._by_kernels(rows, state.on_device)
        else:
            mixed = x.new_empty(len(x), self._delta.num_v_heads * self._delta.v_dim)
            for index, piece in enumerate(state.slices):
                own = rows[piece.first : piece.stop]
                out = advance(
                    state, index, piece, own, num_heads=self._delta.num_v_heads, channels=slice(self._delta.channels),
                    prepare=self._prepare,
                )  # fmt: skip
                mixed[piece.first : piece.stop] = self._gated(out, own)
        return summed(self._o, AdaptedMatrix.O, mixed, adapters, self._group)

    def _gated(self, out: Tensor, rows: Tensor) -> Tensor:
        normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + self._eps) * self._norm
        _, z, *_ = rows.split(self._widths, 1)
        return (normed.flatten(1) * F.silu(z.float())).to(rows.dtype)

    def _by_kernels(self, rows: Tensor, state: DeviceState) -> Tensor:
        from engine.runtime.cuda.recurrence import Weights, advance, gated_norm
        from engine.runtime.cuda.recurrence_state import Sizes

        delta = self._delta
        sizes = Sizes(delta.num_k_heads, delta.num_v_heads, delta.k_dim, delta.v_dim, delta.kernel, delta.shared)
        out = advance(rows, state, sizes, Weights(self._conv, self._decay, self._bias))
        return gated_norm(out, rows.split(self._widths, 1)[1], self._norm, sizes, self._eps)

    def _prepare(self, rows: Tensor, raw: Tensor) -> Rule:
        """Return the delta rule for some rows."""
        q, k, v = self._convolved(raw)
        *_, b, a = rows.split(self._widths, 1)
        decay, beta = (self._decay * F.softplus(a.float() + self._bias)).exp(), b.float().sigmoid()

        def rule(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
            s = s * decay[t, :, None, None]
            change = (v[t] - torch.einsum("hkv,hk->hv", s, k[t])) * beta[t, :, None]
            s = s + k[t, :, :, None] * change[:, None]
            return s, torch.einsum("hkv,hk->hv", s, q[t])

        return rule

    def _convolved(self, raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return float32 queries and keys [T, value heads, k_dim], of length 1 but for a scale, and values."""
        delta = self._delta
        width = delta.num_k_heads * delta.k_dim
        q, k, v = convolved(raw, self._conv).split((width, width, delta.num_v_heads * delta.v_dim), 1)
        q, k = (_unit(part.unflatten(1, (-1, delta.k_dim))) for part in (q, k))
        heads = torch.arange(delta.num_v_heads, device=q.device) // delta.shared % delta.num_k_heads
        q = q * delta.k_dim**-0.5
        return q.index_select(1, heads), k.index_select(1, heads), v.unflatten(1, (-1, delta.v_dim))

    def describe(self) -> PartArgs | None:
        delta = self._delta
        self._taps = self._conv[:, 0].mT.contiguous()  # [kernel, channels], as C reads them
        heads = {"num_heads": delta.num_v_heads, "num_k_heads": delta.num_k_heads, "shared": delta.shared}
        sizes = recurrence_args(self.states[0], self._taps, None, **heads)
        if sizes is None or self._in.args is None or self._gates.args is None:
            return None
        addresses = [each.data_ptr() for each in (self._decay, self._bias, self._norm)]
        self._args = DeltaArgs(sizes, self._in.args, self._gates.args, *addresses)  # C keeps its address
        if self._moves is not None:
            self._args.moves, self._args.num_moves = self._moves.ctypes.data, len(self._moves)
        return describe_part("delta", (LinearArgs(), self._o.args), self._args)


def _reorder(delta: DeltaConfig, make: Maker) -> None:
    """Note the order of heads: adapters have that of the checkpoint, in which neighbours share a key head."""
    heads = torch.arange(delta.num_v_heads).unflatten(0, (delta.num_k_heads, -1)).T.flatten()
    values = (heads[:, None] * delta.v_dim + torch.arange(delta.v_dim)).flatten()
    keys = torch.arange(delta.channels - len(values))
    for name, order in (
        ("in_proj_qkv", torch.cat((keys, len(keys) + values))), ("in_proj_z", values), ("in_proj_b", heads), ("in_proj_a", heads),
    ):  # fmt: skip
        make.targets[make.prefix + name] = make.targets[make.prefix + name]._replace(row_order=order)
    out = make.prefix + "out_proj"
    make.targets[out] = make.targets[out]._replace(input_order=values)


def _moves(delta: DeltaConfig) -> NDArray[np.int32] | None:
    """Return the pieces of a row as projected: their firsts there and in a row by parts, and lengths; None: all fit."""
    if not (delta.has_fused_rows or delta.has_fused_gates):
        return None
    keys, values, width = delta.num_k_heads * delta.k_dim, delta.shared * delta.v_dim, delta.num_v_heads * delta.v_dim
    rows = [(0, delta.k_dim), (keys, delta.k_dim), (2 * keys, values), (delta.channels, values)]
    gates = [(delta.channels + width + first, delta.shared) for first in (0, delta.num_v_heads)]
    pieces = [
        (first + head * num, num)
        for parts, is_fused in ((rows, delta.has_fused_rows), (gates, delta.has_fused_gates))
        for head, (first, num) in _in_order(parts, delta.num_k_heads, is_fused=is_fused)
    ]
    places, lengths = np.array(pieces).T
    return np.stack((np.cumsum(lengths) - lengths, places, lengths), 1).astype(np.int32)


def _in_order(
    parts: Sequence[tuple[int, int]], num_heads: int, *, is_fused: bool
) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the key heads of some parts, head by head if they are fused, else part by part."""
    heads = range(num_heads)
    return (
        ((head, part) for head in heads for part in parts)
        if is_fused
        else ((head, part) for part in parts for head in heads)
    )


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)
