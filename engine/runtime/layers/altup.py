"""Alternating updates (Gemma 3n): several residual streams, of which a layer computes one and corrects the others.

A layer predicts all streams from all streams, computes its parts on the first one, and moves each by a share of what it found
beyond the prediction. Beside its attention stands a product of low rank (LAuReL). The torch operations here define the
arithmetic; the native library has none of it.
"""

from __future__ import annotations

from statistics import NormalDist

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

from engine.runtime.kv_layout import StateSpec
from engine.runtime.layers.adapters import AdaptedMatrix, LayerAdapters, adapted
from engine.runtime.layers.attention import Attention
from engine.runtime.layers.maker import Load, Maker
from engine.runtime.layers.mlp import MLP
from engine.runtime.layers.model_config import ModelConfig
from engine.runtime.layers.norms import RMSNorm
from engine.runtime.layers.parts import Angles, LayerStates
from engine.runtime.layers.per_layer import PerLayerGate
from engine.runtime.native.library import LayerArgs
from engine.runtime.schemes.activations import activate

_LEAST = 1e-5  # of a mean square that divides


class Streams:
    """Makes the streams of embeddings, and one vector of the streams that leave the last layer."""

    def __init__(self, config: ModelConfig, make: Maker) -> None:
        assert config.altup is not None, "the family has its settings"
        hidden, num = config.hidden_size, config.altup.num_streams - 1
        self._spread, self._gather = (
            [make.linear({f"model.{name}.{i}": hidden}, hidden) for i in range(num)]
            for name in ("altup_projections", "altup_unembed_projections")
        )

    def spread(self, x: Tensor) -> Tensor:
        """Return [T, streams, hidden] of x [T, hidden]: products with it, each of its length."""
        return torch.stack([x, *(_of_length(matrix(x), x) for matrix in self._spread)], 1)

    def gather(self, x: Tensor) -> Tensor:
        """Return [T, hidden], the mean of the streams, each of the first one's length."""
        first, *others = (each.contiguous() for each in x.unbind(1))
        rest = [_of_length(matrix(each), first) for matrix, each in zip(self._gather, others, strict=True)]
        return torch.stack([first, *rest]).mean(0)


def _of_length(x: Tensor, like: Tensor) -> Tensor:
    wanted, own = (each.float().square().mean(-1, keepdim=True) for each in (like, x))
    return (x.float() * wanted.sqrt() / own.clamp(min=_LEAST).sqrt()).to(x.dtype)


class AltUpLayer:
    """A layer over several streams."""

    is_capturable = True
    lacking = ""

    def __init__(self, config: ModelConfig, layer: int, make: Maker, *, state: int) -> None:
        """`state` is the number of states of all layers before."""
        assert config.altup is not None, "the family has its settings"
        num, hidden, rank = config.altup.num_streams, config.hidden_size, config.altup.rank
        sparsity = config.layers[layer].sparsity
        self._attention = Attention(config, layer, make, state)
        self._feed_forward = SparseMLP(config, layer, make, sparsity) if sparsity else MLP(config, layer, make)
        self._before, self._after, self._before_ff, self._after_ff, self._after_gate = (
            RMSNorm(make, name, hidden, config)
            for name in (
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
                "post_per_layer_input_norm",
            )
        )
        self._gate = PerLayerGate(config, layer, make)
        self._left = make.linear({"laurel.linear_left": rank}, hidden)
        self._right = make.linear({"laurel.linear_right": hidden}, rank)
        self._after_laurel = RMSNorm(make, "laurel.post_laurel_norm", hidden, config)
        self._router_norm = RMSNorm(make, "altup.router_norm", hidden, config)
        make.loads.append(Load({}, lambda _: self._router_norm.weight.div_(hidden)))
        self._router, self._predict, self._correct = (
            make.tensor(f"altup.{name}.weight", *shape, dtype=torch.float32)
            for name, shape in (
                ("modality_router", (num, hidden)),
                ("prediction_coefs", (num * num, num)),
                ("correction_coefs", (num, num)),
            )
        )
        self._output_scale = make.tensor("altup.correct_output_scale", hidden)
        self._is_scaled = config.altup.scales_output

    def __call__(
        self,
        x: Tensor,
        delta: Tensor | None,  # noqa: ARG002 - the layer before has added its own
        angles: Angles | None,
        attention: LayerStates,
        adapters: LayerAdapters | None,
        inputs: Tensor | None = None,
    ) -> None:
        """Replace the streams x [T, streams, hidden] by those that leave the layer."""
        assert inputs is not None, "the family has inputs of layers"
        streams = x.float()
        coefficients = F.linear(self._modalities(x[:, 0]), self._predict).view(len(x), *[x.shape[1]] * 2)
        predicted = coefficients @ streams + streams
        active = predicted[:, 0].to(x.dtype)
        normed = self._before(active)
        laurel = normed + self._after_laurel(self._right(self._left(normed)))
        mixed = active + self._after(self._attention(normed, angles, attention, adapters))
        mixed = (mixed + laurel) * 0.5**0.5
        found = mixed + self._after_ff(self._feed_forward(self._before_ff(mixed), adapters))
        shares = F.linear(self._modalities(found), self._correct) + 1.0
        corrected = predicted + shares[..., None] * (found - predicted[:, 0])[:, None]
        x.copy_(corrected)
        first = x[:, 0] * self._output_scale if self._is_scaled else x[:, 0].contiguous()
        x[:, 1:] += self._after_gate(self._gate(first, inputs))[:, None]

    def _modalities(self, x: Tensor) -> Tensor:
        return F.linear(self._router_norm(x).float(), self._router).tanh()

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """Return what attention keeps of each token."""
        return self._attention.states

    def describe(self, rotary: int | None) -> LayerArgs | None:  # noqa: ARG002 - a DecoderLayer's
        """Return None: the native library computes one stream."""
        return None


class SparseMLP:
    """An MLP whose gates are 0 below a share of them: their mean plus so many standard deviations is taken off first."""

    is_capturable = True
    lacking = ""

    def __init__(self, config: ModelConfig, layer: int, make: Maker, sparsity: float) -> None:
        make = make.within("mlp")
        hidden, width = config.hidden_size, config.layers[layer].width or config.intermediate_size
        self._gate_up = make.linear({"gate_proj": width, "up_proj": width}, hidden, place=AdaptedMatrix.GATE_UP)
        self._down = make.linear({"down_proj": hidden}, width, place=AdaptedMatrix.DOWN)
        self._deviations, self._activation = NormalDist().inv_cdf(sparsity), config.activation

    def __call__(self, x: Tensor, adapters: LayerAdapters | None = None) -> Tensor:
        """Return [T, hidden] of normed x [T, hidden]."""
        gate, up = adapted(self._gate_up, AdaptedMatrix.GATE_UP, x, adapters).chunk(2, 1)
        wide = gate.float()
        cut = wide.mean(-1, keepdim=True) + wide.std(-1, keepdim=True, correction=0) * self._deviations
        inner = activate((wide - cut).relu().to(gate.dtype), self._activation) * up
        return adapted(self._down, AdaptedMatrix.DOWN, inner, adapters)
