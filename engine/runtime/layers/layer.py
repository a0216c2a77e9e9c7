"""A decoder layer: a mixer and a feed-forward, or one of them, each behind a norm and added to the residual stream.

Two mixers may read the same rows (Falcon-H1); the sum of their results, each times a number, is the mixer's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import cast

import torch
from torch import Tensor

from engine.runtime.cuda.available import has_triton
from engine.runtime.kv_layout import StateSpec, attends
from engine.runtime.layers.model_config import ModelConfig, NormPlacement
from engine.runtime.layers.norms import NoNorm, RMSNorm
from engine.runtime.layers.parts import (
    AdaptedMatrix,
    Angles,
    Attending,
    FeedForward,
    LayerAdapters,
    LayerStates,
    Load,
    Maker,
    Mixer,
    beside,
)
from engine.runtime.native.library import LayerArgs, PartArgs
from engine.runtime.native.parts import norm_args

MakeMixer = Callable[[ModelConfig, int, Maker, int], Mixer]  # settings, layer, tensors, number of states before its own
MakeFeedForward = Callable[[ModelConfig, int, Maker], FeedForward]

# By the names in LayerConfig; a kind's module is imported when a model has it.
MIXERS = {
    "attention": "engine.runtime.layers.attention:Attention",
    "latent": "engine.runtime.layers.latent:LatentAttention",
    "delta": "engine.runtime.layers.delta:DeltaNet",
    "mamba": "engine.runtime.layers.mamba:Mamba2",
    "short_conv": "engine.runtime.layers.short_conv:ShortConv",
}
FEED_FORWARDS = {
    "mlp": "engine.runtime.layers.mlp:MLP",
    "mixture": "engine.runtime.layers.mixture:make_mixture",
    "beside": "engine.runtime.layers.mixture:MLPBesideMixture",
}
_CAPTURABLE = ("attention", "latent", "delta", "mamba", "short_conv")  # mixers for which a GPU has kernels

# Checkpoint names of the norms before the mixer, after it, before the feed-forward and after it.
_NORM_NAMES: Mapping[NormPlacement, tuple[str | None, str | None, str | None, str | None]] = {
    NormPlacement.PRE: ("input_layernorm", None, "post_attention_layernorm", None),
    NormPlacement.POST: (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    NormPlacement.SANDWICH: (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
_NORMS = ("before_mixer", "after_mixer", "before_feed_forward", "after_feed_forward", "after_gate")


class DecoderLayer:
    """A mixer and a feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, make: Maker, *, state: int) -> None:
        """`state` is the number of states of all layers before."""
        settings = config.layers[layer]
        mixers, self.states, of_mixer = list[Mixer](), tuple[StateSpec, ...](), make
        self._feed_forward: FeedForward | None = None
        for name in settings.mixers:
            make_mixer: MakeMixer = resolve_name(MIXERS[name])
            mixers.append(make_mixer(config, layer, of_mixer, state + len(self.states)))
            self.states += mixers[-1].states  # all that it keeps
            of_mixer = make._replace(first_place=AdaptedMatrix.BESIDE_QKV)
        self._mixer, self._beside = (*mixers, None, None)[:2]
        self._mixer_scales = settings.mixer_scales
        if settings.feed_forward:
            make_feed_forward: MakeFeedForward = resolve_name(FEED_FORWARDS[settings.feed_forward])
            self._feed_forward = make_feed_forward(config, layer, make)
        self._has_kernels = set(_CAPTURABLE).issuperset(settings.mixers)
        self._scale, self._device = config.residual_multiplier, make.device
        names = _NORM_NAMES[config.norm_placement]
        if settings.feed_forward == "beside":  # whose parts have norms of their own
            names = (*names[:2], None, names[3])
        if self._feed_forward is None:
            names = (names[0], None, None, None)
        if self._mixer is None:  # its only norm has the first one's name
            names = (None, None, names[0], None)
        places = [RMSNorm(make, name, config.hidden_size, config) if name else NoNorm() for name in names]
        self._before_mixer, self._after_mixer, self._before_feed_forward, self._after_feed_forward = places
        read = self._before_feed_forward.weight
        if config.feed_forward_multiplier != 1.0 and read is not None:
            make.loads.append(Load({}, lambda _: read.mul_(config.feed_forward_multiplier)))
        self._gate, self._after_gate = None, places[-1]
        if config.layer_inputs:
            from engine.runtime.layers.altup import PerLayerGate

            self._gate = PerLayerGate(config, layer, make)
            self._after_gate = RMSNorm(make, "post_per_layer_input_norm", config.hidden_size, config)
        self._stream_scale = make.tensor("layer_scalar", 1, dtype=torch.float32) if config.has_layer_scale else None

    def __call__(
        self,
        x: Tensor,
        delta: Tensor | None,
        angles: Angles | None,
        attention: LayerStates,
        adapters: LayerAdapters | None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Add the previous layer's output `delta` to x [T, hidden]; return this layer's output.

        The sum and its norm are one pass over memory where possible. `inputs` are those of all layers (altup.py).
        """
        if self._mixer is not None:
            normed = self._before_mixer.add(x, delta, self._scale)
            mixed = self._mixer(normed, angles, attention, adapters)
            if self._beside is not None:
                other = self._beside(normed, angles, attention, beside(adapters))
                mixed = mixed.mul_(self._mixer_scales[0]).add_(other, alpha=self._mixer_scales[1])
            delta = self._after_mixer(mixed)
        if self._feed_forward is not None:
            normed = self._before_feed_forward.add(x, delta, self._scale)
            delta = self._after_feed_forward(self._feed_forward(normed, adapters))
        assert delta is not None, "a layer has a part"
        if self._gate is not None and inputs is not None:
            x.add_(delta, alpha=self._scale)
            delta = self._after_gate(self._gate(x, inputs))
        if self._stream_scale is not None:
            x.mul_(self._stream_scale)
            delta.mul_(self._stream_scale)
        return delta

    def store(self, x: Tensor, angles: Angles | None, attention: LayerStates) -> None:
        """Store the keys and values of x [T, hidden], in a layer whose mixer attends."""
        cast("Attending", self._mixer).attend(self._before_mixer.add(x, None, self._scale), angles, attention, None)

    @property
    def is_capturable(self) -> bool:
        """Return whether a CUDA graph can hold the loaded layer."""
        takes_states = has_triton(self._device) or len(attends(self.states)) == len(self.states)
        is_fit = self._feed_forward is None or self._feed_forward.is_capturable
        return self._has_kernels and takes_states and is_fit

    def describe(self, rotary: int) -> LayerArgs | None:
        """Describe the loaded layer, of this rotary or -1, to the native library; None if that cannot compute it."""
        parts = {"mixer": self._mixer, "beside": self._beside, "feed_forward": self._feed_forward, "gate": self._gate}
        described, kinds = dict[str, PartArgs](), [type(state) for state in self.states]
        if len(set(kinds)) < len(kinds):  # a description has room for one state of a kind
            return None
        for name, part in parts.items():
            args = None if part is None else part.describe()
            if part is not None and args is None:
                return None
            if args is not None:
                described[name] = args
                args.reads_rows = self._beside is not None and name in ("mixer", "beside")
        norms = {name: norm_args(getattr(self, f"_{name}").weight) for name in _NORMS}
        scale = 1.0 if self._stream_scale is None else self._stream_scale.item()
        mixer, beside = self._mixer_scales
        return LayerArgs(
            rotary=rotary, mixer_scale=mixer, beside_scale=beside, stream_scale=scale, **described, **norms
        )
