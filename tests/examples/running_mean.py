"""A mixer: each token sees the mean of a product over all tokens up to its own."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.runtime.kv_layout import AttentionSpec
from engine.runtime.layers.model_config import ModelConfig
from engine.runtime.layers.parts import AdaptedMatrix, Angles, LayerAdapters, LayerAttention, Maker, adapted
from engine.runtime.layers.shards import Plan, colwise, rowwise
from engine.runtime.native.library import PartArgs
from engine.runtime.native.parts import describe_part, scores_args

_PLAN: Plan = {"v_proj": colwise("heads"), "o_proj": rowwise("heads")}


class RunningMean:
    """o(mean of v(x)). The paged pool keeps v(x) as a latent; queries of zeros give all tokens the same weight."""

    def __init__(self, config: ModelConfig, layer: int, make: Maker, state: int) -> None:
        make, heads = make.within("mean", plan=_PLAN), config.layers[layer].heads
        width = heads.num_heads * heads.head_dim
        self._v = make.linear({"v_proj": width}, config.hidden_size, place=AdaptedMatrix.QKV)
        self._o = make.linear({"o_proj": config.hidden_size}, width, place=AdaptedMatrix.O)
        self._state, self._group = state, make.group
        self.states = (AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=width, scale=1.0, value_dim=width),)
        self._scores = scores_args(self.states[0])

    def __call__(
        self,
        x: Tensor,
        angles: Angles | None,
        attention: LayerAttention,
        adapters: LayerAdapters | None = None,
    ) -> Tensor:
        """Return [T, hidden] of x [T, hidden]."""
        rows = adapted(self._v, AdaptedMatrix.QKV, x, adapters)[:, None]
        mean = attention(self._state, torch.zeros_like(rows), rows, rows)[:, 0]
        y = adapted(self._o, AdaptedMatrix.O, mean, adapters)
        self._group.all_reduce(y)
        return y

    def describe(self) -> PartArgs | None:
        """Describe the mixer to the native library: its kind, its two matrices, and how it attends."""
        return describe_part("running_mean", (self._v.args, self._o.args), self._scores)
