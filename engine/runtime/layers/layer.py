"""A decoder layer: a mixer and a feed-forward, each behind a norm and added to the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pkgutil import resolve_name

from torch import Tensor

from engine.runtime.kv_layout import StateSpec, attends
from engine.runtime.layers.adapters import LayerAdapters
from engine.runtime.layers.maker import Maker
from engine.runtime.layers.model_config import ModelConfig, NormPlacement
from engine.runtime.layers.norms import NoNorm, RMSNorm
from engine.runtime.layers.parts import Angles, FeedForward, LayerStates, Mixer
from engine.runtime.native.decoder import norm_args
from engine.runtime.native.library import LayerArgs

MakeMixer = Callable[[ModelConfig, int, Maker, int], Mixer]  # settings, layer, tensors, number of states before its own
MakeFeedForward = Callable[[ModelConfig, int, Maker], FeedForward]

# By the names in LayerConfig; a kind's module is imported when a model has it.
MIXERS = {
    "attention": "engine.runtime.layers.attention:Attention",
    "latent": "engine.runtime.layers.latent:LatentAttention",
    "delta": "engine.runtime.layers.delta:DeltaNet",
}
FEED_FORWARDS = {
    "mlp": "engine.runtime.layers.mlp:MLP",
    "mixture": "engine.runtime.layers.mixture:make_mixture",
}

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


class DecoderLayer:
    """A mixer and a feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, make: Maker, *, state: int) -> None:
        """`state` is the number of states of all layers before."""
        settings = config.layers[layer]
        make_mixer: MakeMixer = resolve_name(MIXERS[settings.mixer])
        make_feed_forward: MakeFeedForward = resolve_name(FEED_FORWARDS[settings.feed_forward])
        self._mixer, self._feed_forward = make_mixer(config, layer, make, state), make_feed_forward(config, layer, make)
        self._scale = config.residual_multiplier
        names = _NORM_NAMES[config.norm_placement]
        places = [RMSNorm(make, name, config.hidden_size, config) if name else NoNorm() for name in names]
        self._before_mixer, self._after_mixer, self._before_feed_forward, self._after_feed_forward = places

    def __call__(
        self,
        x: Tensor,
        delta: Tensor | None,
        angles: Angles | None,
        attention: LayerStates,
        adapters: LayerAdapters | None,
    ) -> Tensor:
        """Add the previous layer's output `delta` to x [T, hidden]; return this layer's output.

        The sum and its norm are one pass over memory where possible."""
        normed = self._before_mixer.add(x, delta, self._scale)
        mixed = self._after_mixer(self._mixer(normed, angles, attention, adapters))
        normed = self._before_feed_forward.add(x, mixed, self._scale)
        return self._after_feed_forward(self._feed_forward(normed, adapters))

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """Return what the mixer keeps."""
        return self._mixer.states

    @property
    def is_capturable(self) -> bool:
        """Return whether a CUDA graph can hold the loaded layer."""
        return self._feed_forward.is_capturable and len(attends(self.states)) == len(self.states)

    @property
    def lacking(self) -> str:
        """Return a matrix without which the native library cannot compute the feed-forward; "" for none."""
        return self._feed_forward.lacking

    def describe(self, rotary: int | None) -> LayerArgs | None:
        """Describe the loaded layer to the native library, or return None if that cannot compute it."""
        parts = self._mixer.describe(), self._feed_forward.describe()
        if parts[0] is None or parts[1] is None or len(self.states) != 1:  # a description has room for one state
            return None
        norms = (self._before_mixer, self._after_mixer, self._before_feed_forward, self._after_feed_forward)
        return LayerArgs(*parts, *(norm_args(norm.weight) for norm in norms), rotary=-1 if rotary is None else rotary)
