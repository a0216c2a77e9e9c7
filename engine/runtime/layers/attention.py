"""Attention over keys and values of each token: the mixer of most models."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

from engine.runtime.attention.backend import Rotation
from engine.runtime.kv_layout import AttentionSpec
from engine.runtime.layers.model_config import ModelConfig, QKNorm
from engine.runtime.layers.norms import FullNorm, HeadNorm
from engine.runtime.layers.parts import AdaptedMatrix, Angles, LayerAdapters, LayerAttention, Maker, adapted, summed
from engine.runtime.layers.rope import rotate
from engine.runtime.layers.shards import Plan, colwise, rowwise
from engine.runtime.native.library import PartArgs
from engine.runtime.native.parts import describe_part, norm_args, scores_args
from engine.runtime.native.structs import structure

_BY_HEAD, _FULL = 1, 2  # norms of queries and keys, as in attention.c
_GATED, _GATED_BY_HEAD = 1, 2  # gates, likewise


_PLAN: Plan = {
    "q_proj": colwise("heads"),
    "k_proj": colwise("kv_heads"),
    "v_proj": colwise("kv_heads"),
    "qkv_proj": colwise("heads", "kv_heads", "kv_heads"),
    "g_proj": colwise("heads"),
    "o_proj": rowwise("heads"),
    "sinks": colwise("heads"),
}
AttentionArgs = structure("attention")  # what the native library needs beside matrices


class Attention:
    """Queries, keys and values from one matrix, rotated, attended, projected; or queries alone, for others' keys."""

    def __init__(
        self, config: ModelConfig, layer: int, make: Maker, state: int, *, num_inputs: int | None = None
    ) -> None:
        """`num_inputs` is the width of x, if it is not the hidden size."""
        make = make.within("self_attn", plan=_PLAN)
        heads, source = config.layers[layer].heads, config.layers[layer].source
        whole = heads
        if source is not None:
            heads = replace(heads, num_kv_heads=0)
        self._state, self._num_heads = state, heads.num_heads
        self._heads = heads.num_heads + heads.num_kv_heads  # the heads that are normalised and rotated
        self._shape = (-1, self._heads + heads.num_kv_heads, heads.head_dim)
        self._gates = _GATED_BY_HEAD * heads.has_head_gates or _GATED * heads.is_gated
        width, kv_width = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        rows = {"q_proj": width * (1 + heads.is_gated)}
        if source is None:
            rows |= {"k_proj": kv_width, "v_proj": kv_width}
        if heads.has_head_gates:
            rows["g_proj"] = heads.num_heads
        if config.merged_checkpoint:
            rows = {"qkv_proj": sum(rows.values())}
        self._qkv = make.linear(rows, num_inputs or config.hidden_size, bias=config.qkv_bias, place=AdaptedMatrix.QKV)
        keys = make.targets.get(make.prefix + "k_proj")
        if heads.values_are_keys and keys is not None:  # an adapter's terms for keys are those of values, too
            del make.targets[make.prefix + "v_proj"]
            make.targets[make.prefix + "k_proj"] = keys._replace(row_order=torch.arange(kv_width).repeat(2))
        self._o = make.linear({"o_proj": config.hidden_size}, width, bias=config.o_bias, place=AdaptedMatrix.O)
        self._head_norm = HeadNorm(config, heads, make) if config.qk_norm is QKNorm.HEAD else None
        self._full_norm = FullNorm(config, heads, make) if config.qk_norm is QKNorm.FULL else None
        self._clip, self._group = config.qkv_clip, make.group
        self._value_weight: Tensor | None = None  # of a norm of each head's values
        if config.value_norm and source is None:
            assert self._head_norm is not None, "heads of queries and keys are normalised, too"
            self._value_weight = torch.ones_like(self._head_norm.q.weight)
        self._sinks = make.tensor("sinks", heads.num_heads, dtype=torch.float32) if config.has_sinks else None
        self.states = (
            AttentionSpec(
                num_heads=heads.num_heads,
                num_kv_heads=whole.num_kv_heads,
                head_dim=heads.head_dim,
                scale=config.attention_scale or heads.head_dim**-0.5,
                window=config.layers[layer].window,
                softcap=config.attention_softcap,
                sinks=self._sinks,
                source=source,
                is_causal=config.layers[layer].is_causal,
                reach=config.layers[layer].reach,
            ),
        )

    def __call__(
        self, x: Tensor, angles: Angles | None, attention: LayerAttention, adapters: LayerAdapters | None = None
    ) -> Tensor:
        """Compute attention for x [T, inputs]; `angles` from Rotary, None without positions."""
        out, gate = self.attend(x, angles, attention, adapters)
        if gate is not None:
            out = (out.float() * gate.float().sigmoid()).to(out.dtype)
        return summed(self._o, AdaptedMatrix.O, out, adapters, self._group)

    def attend(
        self, x: Tensor, angles: Angles | None, attention: LayerAttention, adapters: LayerAdapters | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Store keys and values; return what all heads attend to [T, width], and the gate of that.

        The tensors that `attention` gets are views into wider rows: a token's heads are contiguous, tokens are not.
        """
        qkv, gate = adapted(self._qkv, AdaptedMatrix.QKV, x, adapters), None
        if self._gates:
            qkv, gate = self._split(qkv)
        qkv = qkv.view(self._shape)
        qk = qkv[:, : self._heads]
        if self._full_norm is not None:
            qk.copy_(self._full_norm(qk))
        if self._clip is not None:
            qkv.clamp_(-self._clip, self._clip)
        if self._value_weight is not None and self._head_norm is not None:
            values = qkv[:, self._heads :]
            values.copy_(F.rms_norm(values, values.shape[-1:], None, self._head_norm.eps))
        (spec,) = self.states
        if attention.from_projected is not None and spec.source is None:
            out = attention.from_projected(self._state, qkv, self._rotation(angles))
        else:
            if self._head_norm is not None:
                qk = self._head_norm(qk)
            if angles is not None:
                qk = rotate(qk, *angles)
            q, k, v = qk[:, : self._num_heads], qk[:, self._num_heads :], qkv[:, self._heads :]
            if spec.source is not None:
                k = v = q[:, : spec.num_kv_heads]  # which are not read
            out = attention(self._state, q, k, v)
        return out.flatten(1), gate

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries, keys and values without gates, and the gates [T, width]."""
        if self._gates == _GATED_BY_HEAD:
            gates = projected[:, -self._num_heads :]
            return projected[:, : -self._num_heads], gates.repeat_interleave(self._shape[2], 1)
        width = self._num_heads * self._shape[2]
        q, gate = projected[:, : 2 * width].unflatten(1, (self._num_heads, 2, -1)).unbind(2)
        return torch.cat((q.flatten(1), projected[:, 2 * width :]), 1), gate.flatten(1)

    def _rotation(self, angles: Angles | None) -> Rotation:
        if self._head_norm is not None:
            return Rotation((self._head_norm.q.weight, self._head_norm.k.weight), self._head_norm.eps, angles)
        return Rotation(None, 0.0, angles)

    def describe(self) -> PartArgs | None:
        """Describe the part to the native library, which has no sums over ranks for norms of whole queries and keys."""
        if self._full_norm is not None and self._group.size > 1:
            return None
        num_kv_heads, head_dim = self._shape[1] - self._heads, self._shape[2]
        self._args = AttentionArgs(  # C keeps its address
            scores=scores_args(self.states[0]),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            clip=self._clip or 0.0,
            gates=self._gates,
            v=norm_args(self._value_weight),
        )
        norm = self._head_norm or self._full_norm
        if norm is not None:
            self._args.qk_norm = _FULL if norm is self._full_norm else _BY_HEAD
            self._args.q, self._args.k = norm_args(norm.q.weight), norm_args(norm.k.weight)
        return describe_part("attention", (self._qkv.args, self._o.args), self._args)
