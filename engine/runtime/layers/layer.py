"""A decoder layer: a mixer and a feed-forward, or one of them, each behind a norm and added to the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import cast

import torch
from torch import Tensor

from engine.runtime.cuda.available import has_triton
from engine.runtime.kv_layout import StateSpec, attends
from engine.runtime.layers.adapters import LayerAdapters
from engine.runtime.layers.maker import Maker
from engine.runtime.layers.model_config import ModelConfig, NormPlacement
from engine.runtime.layers.norms import NoNorm, RMSNorm
from engine.runtime.layers.parts import Angles, Attending, FeedForward, LayerStates, Mixer
from engine.runtime.native.decoder import norm_args
from engine.runtime.native.library import LayerArgs

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
    "beside": "engine.runtime.layers.beside:MLPBesideMixture",
}
_CAPTURABLE = ("", "attention", "latent", "delta", "mamba", "short_conv")  # mixers for which a GPU has kernels

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
        self._mixer: Mixer | None = None
        self._feed_forward: FeedForward | None = None
        if settings.mixer:
            make_mixer: MakeMixer = resolve_name(MIXERS[settings.mixer])
            self._mixer = make_mixer(config, layer, make, state)
        if settings.feed_forward:
            make_feed_forward: MakeFeedForward = resolve_name(FEED_FORWARDS[settings.feed_forward])
            self._feed_forward = make_feed_forward(config, layer, make)
        self._has_kernels = settings.mixer in _CAPTURABLE
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
        self._gate, self._after_gate = None, places[-1]
        if config.layer_inputs:
            from engine.runtime.layers.per_layer import PerLayerGate

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

        The sum and its norm are one pass over memory where possible. `inputs` are those of all layers (per_layer.py).
        """
        if self._mixer is not None:
            normed = self._before_mixer.add(x, delta, self._scale)
            delta = self._after_mixer(self._mixer(normed, angles, attention, adapters))
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
    def states(self) -> tuple[StateSpec, ...]:
        """Return what the mixer keeps."""
        return () if self._mixer is None else self._mixer.states

    @property
    def is_capturable(self) -> bool:
        """Return whether a CUDA graph can hold the loaded layer."""
        takes_states = has_triton(self._device) or len(attends(self.states)) == len(self.states)
        is_fit = self._feed_forward is None or self._feed_forward.is_capturable
        return self._has_kernels and takes_states and is_fit

    @property
    def lacking(self) -> str:
        """Return a matrix without which the native library cannot compute the feed-forward; "" for none."""
        return "" if self._feed_forward is None else self._feed_forward.lacking

    def describe(self, rotary: int | None) -> LayerArgs | None:
        """Describe the loaded layer to the native library, or return None if that cannot compute it."""
        parts = {"mixer": self._mixer, "feed_forward": self._feed_forward, "gate": self._gate}
        described = {name: part.describe() for name, part in parts.items() if part is not None}
        if None in described.values() or len(self.states) > 1:  # a description has room for one state
            return None
        norms = {name: norm_args(getattr(self, f"_{name}").weight) for name in _NORMS}
        args = LayerArgs(rotary=-1 if rotary is None else rotary, **described, **norms)
        args.stream_scale = 1.0 if self._stream_scale is None else self._stream_scale.item()
        return args
