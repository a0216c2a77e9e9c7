"""The settings of a config.json that the model families spell alike."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from engine.files.hf_config import HFConfig
from engine.runtime.activation import Activation
from engine.runtime.layers.model_config import HeadsConfig, LayerConfig, Mixtures, ModelConfig
from engine.runtime.layers.rope_config import RopeConfig, read_rope

SLIDING, FULL = "sliding_attention", "full_attention"
MOST_OF_ROW = 1 << 16  # numbers of a head, or of a latent: a thread's stack holds a row of them
_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    "gelu": Activation.GELU,
}


def settings(hf: HFConfig) -> ModelConfig:
    """Return the settings that all families name alike."""
    bias = hf.flag("attention_bias")
    return ModelConfig(
        vocab_size=hf.size("vocab_size"),
        hidden_size=hf.size("hidden_size"),
        intermediate_size=hf.size("intermediate_size"),
        max_positions=max_positions(hf),
        layers=layers(hf),
        norm_eps=hf.positive("rms_norm_eps", 1e-6),
        activation=activation(hf, "hidden_act", "silu"),
        tied_head=hf.flag("tie_word_embeddings"),
        qkv_bias=bias,
        o_bias=bias,
    )


def num_layers(hf: HFConfig) -> int:
    return hf.size("num_hidden_layers")


def num_mtp_layers(hf: HFConfig) -> int:
    """Return the number of MTP layers; transformers and Qwen have other names for it."""
    return hf.integer("num_nextn_predict_layers", hf.integer("num_mtp_layers", hf.integer("mtp_num_hidden_layers", 0)))


def max_positions(hf: HFConfig) -> int:
    return hf.size("max_position_embeddings")


def head_dim(hf: HFConfig) -> int:
    return hf.size("head_dim", hf.size("hidden_size") // hf.size("num_attention_heads"), MOST_OF_ROW)


def activation(hf: HFConfig, key: str, default: str) -> Activation:
    return hf.chosen(key, _ACTIVATIONS, default)


def heads(hf: HFConfig) -> HeadsConfig:
    num_heads = hf.size("num_attention_heads")
    num_kv_heads = hf.size("num_key_value_heads", num_heads)
    return HeadsConfig(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim(hf))


def layers(
    hf: HFConfig,
    *,
    windows: Sequence[int | None] | None = None,
    ropes: Sequence[RopeConfig | None] | None = None,
    moes: Mixtures | None = None,
) -> tuple[LayerConfig, ...]:
    """Return all layers; without `ropes` all have the same rope, without `moes` a dense MLP."""
    windows = windows or [None] * num_layers(hf)
    ropes = ropes or [rope(hf)] * num_layers(hf)
    moes = moes or [None] * num_layers(hf)
    return tuple(LayerConfig(heads(hf), *each) for each in zip(windows, ropes, moes, strict=True))


def layer_types(hf: HFConfig, types: Sequence[str], kinds: Collection[str] = (SLIDING, FULL)) -> Sequence[str]:
    """Return `layer_types`, or the family's default `types`."""
    types = hf.texts("layer_types") if hf.has("layer_types") else types
    if len(types) != num_layers(hf) or not set(kinds).issuperset(types):
        raise hf.error("layer_types", f"{num_layers(hf)} entries, each {' or '.join(kinds)}")
    return types


def taps(hf: HFConfig, key: str, default: int) -> int:
    """Return the taps of a convolution along the tokens."""
    found = hf.size(key, default)
    hf.require(found >= 2, key, "2 or more, because a state keeps the tokens before")
    return found


def windows(hf: HFConfig, types: Sequence[str]) -> list[int | None]:
    return [hf.size("sliding_window") if kind == SLIDING else None for kind in layer_types(hf, types)]


def rope(hf: HFConfig, theta: float = 10_000.0) -> RopeConfig:
    """Return one rope for all layers, from `rope_parameters` (transformers 5) or older keys."""
    params = hf.section("rope_parameters" if hf.has("rope_parameters") else "rope_scaling")
    return rope_from(hf, params, theta=hf.positive("rope_theta", theta))


def ropes_by_type(hf: HFConfig, types: Sequence[str], *, local_theta: float, theta: float) -> list[RopeConfig | None]:
    """Return the ropes of window and full layers: nested (transformers 5), or flat."""
    nested = hf.section("rope_parameters")
    full = nested.section(FULL) if nested.values else hf.section("rope_scaling")
    ropes = {
        SLIDING: rope_from(hf, nested.section(SLIDING), theta=local_theta),
        FULL: rope_from(hf, full, theta=hf.positive("rope_theta", theta)),
    }
    return [ropes[kind] for kind in layer_types(hf, types)]


def rope_from(hf: HFConfig, params: HFConfig, *, theta: float) -> RopeConfig:
    return read_rope(params, hf, theta=theta, head_dim=head_dim(hf), max_positions=max_positions(hf))


def both_ways(config: ModelConfig) -> ModelConfig:
    """Return a model whose tokens attend both ways; half of a window is on either side."""
    layers = [
        replace(layer, window=None, reach=None if layer.window is None else layer.window // 2)
        for layer in config.layers
    ]
    return replace(config, layers=tuple(layers), both_ways=True, has_head=False, tied_head=False)
