"""The model families with recurrent layers, as those of families.py; imported where a model is of one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from engine.files.hf_config import HFConfig
from engine.runtime.activation import Activation
from engine.runtime.layers.model_config import (
    DeltaConfig,
    LayerConfig,
    MambaConfig,
    Mixtures,
    ModelConfig,
    NormPlacement,
    QKNorm,
    RecurrentConfig,
    ShortConvConfig,
)
from engine.runtime.models import common_settings as common
from engine.runtime.models.expert_settings import (
    granite_experts,
    lfm2_experts,
    nemotron_experts,
    qwen_experts,
)
from engine.runtime.models.families import granite_settings

# The names of sizes, and their defaults.
_GRANITE = {
    "num_heads": ("mamba_n_heads", 128),
    "num_groups": ("mamba_n_groups", 1),
    "state_dim": ("mamba_d_state", 256),
    "kernel": ("mamba_d_conv", 4),
}
_MAMBA2 = {
    "num_heads": ("num_heads", 128),
    "num_groups": ("n_groups", 8),
    "state_dim": ("state_size", 128),
    "kernel": ("conv_kernel", 4),
}
_NEMOTRON = {
    "num_heads": ("mamba_num_heads", 128),
    "num_groups": ("n_groups", 8),
    "state_dim": ("ssm_state_size", 128),
    "kernel": ("conv_kernel", 4),
}
_BLOCKS = {  # published names, transformers' names and the letters of patterns
    **dict.fromkeys(("M", "mamba", "linear_attention"), "mamba"),
    **dict.fromkeys(("*", "attention", common.FULL), "attention"),
    **dict.fromkeys(("-", "mlp"), "mlp"),
    **dict.fromkeys(("E", "moe"), "moe"),
}
_MAX_STEP = 1e30  # of finite bounds; float32 has more
_MAMBA, _ATTENTION = ("mamba", "linear_attention"), ("attention", common.FULL)  # published names, transformers' names


def with_mamba(hf: HFConfig, layers: Sequence[LayerConfig]) -> tuple[LayerConfig, ...]:
    """Return layers of which those that `layer_types` names, all by default, are Mamba-2."""
    types = common.layer_types(hf, [_MAMBA[0]] * len(layers), (*_MAMBA, *_ATTENTION))
    if set(_MAMBA).isdisjoint(types):
        return tuple(layers)
    return _mixing(layers, [kind in _MAMBA for kind in types], "mamba", mamba_sizes(hf))


def _mixing(
    layers: Sequence[LayerConfig], chosen: Iterable[bool], mixer: str, recurrent: RecurrentConfig
) -> tuple[LayerConfig, ...]:
    """Return layers of which some have another mixer, which knows no positions."""
    return tuple(
        replace(layer, rope=None, mixer=mixer, recurrent=recurrent) if is_chosen else layer
        for layer, is_chosen in zip(layers, chosen, strict=True)
    )


def one_part_layers(hf: HFConfig) -> tuple[LayerConfig, ...]:
    """Return Nemotron's layers: each is Mamba-2, attention, an MLP or a mixture alone, as a list or a pattern says."""
    is_listed = hf.has("layers_block_type")
    key = "layers_block_type" if is_listed else "hybrid_override_pattern"
    kinds = [_BLOCKS.get(each) for each in (hf.texts(key) if is_listed else hf.text(key))]
    if None in kinds or not {"attention", "mamba"}.intersection(kinds):
        raise hf.error(key, f"{', '.join(_BLOCKS)}, one a layer, and one of them attention or mamba")
    hf = HFConfig({**hf.values, "num_hidden_layers": len(kinds)}, hf.source)
    mamba = _mamba_of_nemotron(hf) if "mamba" in kinds else None
    moe = nemotron_experts(hf)[0] if "moe" in kinds else None
    attention = LayerConfig(common.heads(hf), None, None, has_feed_forward=False)
    layers = {
        "attention": attention,
        "mamba": replace(attention, mixer="mamba", recurrent=mamba),
        "mlp": replace(attention, mixer="", has_feed_forward=True),
        "moe": replace(attention, mixer="", has_feed_forward=True, moe=moe),
    }
    return tuple(layers[kind] for kind in kinds if kind is not None)


def mamba_sizes(hf: HFConfig) -> MambaConfig:
    """Return the sizes of Mamba-2 layers, in the names of Granite 4."""
    width = hf.size("mamba_d_ssm", hf.size("mamba_expand", 2) * hf.size("hidden_size"))
    num_heads, is_auto = hf.size(*_GRANITE["num_heads"]), hf.values.get("mamba_d_head", "auto") == "auto"
    head_dim = width // num_heads if is_auto else hf.size("mamba_d_head")
    if num_heads * head_dim != width:
        raise hf.error("mamba_d_head", f"{width // num_heads}, for {num_heads} heads of {width} numbers")
    return _read(hf, _GRANITE, head_dim, _step_limit(hf), biases=("mamba_conv_bias", "mamba_proj_bias"))


def mamba_alone(hf: HFConfig) -> MambaConfig:
    """Return the same in the names of models that have nothing else."""
    return _read(hf, _MAMBA2, hf.size("head_dim", 64), _step_limit(hf))


def _mamba_of_nemotron(hf: HFConfig) -> MambaConfig:
    """Return the same in the names of Nemotron, whose steps have a lower bound alone, as in transformers."""
    if _step_limit(hf) != (0.0, math.inf):
        raise hf.error("time_step_limit", "0 and infinity: 'time_step_min' is the bound of this family")
    step_limit = (hf.number("time_step_min", 0.001), math.inf)
    return _read(hf, _NEMOTRON, hf.size("mamba_head_dim", 64), step_limit, activation="mamba_hidden_act")


def _read(
    hf: HFConfig,
    names: Mapping[str, tuple[str, int]],
    head_dim: int,
    step_limit: tuple[float, float],
    *,
    biases: tuple[str, str] = ("use_conv_bias", "use_bias"),
    activation: str = "hidden_act",
) -> MambaConfig:
    """Return the sizes by their names. Raises ModelLoadError for those that no layer can have."""
    num_heads, num_groups = hf.size(*names["num_heads"]), hf.size(*names["num_groups"])
    if num_heads % num_groups:
        raise hf.error(names["num_groups"][0], f"a number that divides {names['num_heads'][0]}, {num_heads}")
    if common.activation(hf, activation, "silu") is not Activation.SILU:
        raise hf.error(activation, "silu, which the convolution has too")
    return MambaConfig(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_dim=hf.size(*names["state_dim"]),
        kernel=common.taps(hf, *names["kernel"]),
        has_conv_bias=hf.flag(biases[0], True),
        has_bias=hf.flag(biases[1]),
        step_limit=step_limit,
    )


def _step_limit(hf: HFConfig) -> tuple[float, float]:
    """Return the bounds of a token's step; transformers writes infinity, which JSON lacks, as an object."""
    values = hf.values.get("time_step_limit")
    if values is None:
        return 0.0, math.inf
    found = [
        math.inf if isinstance(each, Mapping) and each.get("__float__") == "Infinity" else each
        for each in (values if isinstance(values, (list, tuple)) else ())
    ]
    found = [each for each in found if isinstance(each, (int, float)) and (each == math.inf or abs(each) < _MAX_STEP)]
    if len(found) != 2 or len(values) != 2 or found[0] > found[1] or found[0] == math.inf or found[1] < 0:
        raise hf.error("time_step_limit", "two numbers, of which the second is 0 or more, and may be infinite")
    return float(found[0]), float(found[1])


_LINEAR, _CONV = "linear_attention", "conv"
_LEAST = 2.0**-100  # of products of multipliers; with its inverse far within float32
_LFM3_ROPES = {
    common.SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    common.FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}


def granitemoehybrid(hf: HFConfig) -> ModelConfig:
    """Granite 4: Mamba-2 or attention in each layer, and a shared expert alone or beside others."""
    num_layers = common.num_layers(hf)
    ropes = None if hf.text("position_embedding_type", "nope") == "rope" else [None] * num_layers
    config, moes = granite_settings(hf), None
    if hf.values.get("num_local_experts") == 0:
        config = replace(config, intermediate_size=hf.size("shared_intermediate_size", 1024))
    else:
        moes = granite_experts(hf, shared_width=1024)
    return replace(config, layers=with_mamba(hf, common.layers(hf, ropes=ropes, moes=moes)))


def bamba(hf: HFConfig) -> ModelConfig:
    """Bamba: Mamba-2, and in some layers attention, of whose heads a half is rotated."""
    attending = hf.numbers("attn_layer_indices") if hf.has("attn_layer_indices") else ()
    types = [common.FULL if i in attending else _LINEAR for i in range(common.num_layers(hf))]
    defaults = {"max_position_embeddings": 262_144, "rms_norm_eps": 1e-5}
    hf = HFConfig({**defaults, **hf.values, "layer_types": types, "partial_rotary_factor": 0.5}, hf.source)
    layers = with_mamba(hf, common.layers(hf))
    return replace(common.settings(hf), mlp_bias=hf.flag("mlp_bias"), layers=layers)


def falcon_h1(hf: HFConfig) -> ModelConfig:
    """Falcon-H1: attention and Mamba-2 side by side in each layer, between multipliers."""
    for bias in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
        hf.refuse(bias, "no published model of this family has it")
    if hf.flag("mamba_rms_norm") and hf.flag("mamba_norm_before_gate", True):
        raise hf.error("mamba_norm_before_gate", "false: norms are of gated results")
    into, out, key = (
        hf.positive(name, 1.0) for name in ("attention_in_multiplier", "attention_out_multiplier", "key_multiplier")
    )
    into_mamba, out_of_mamba = (hf.positive(f"ssm_{side}_multiplier", 1.0) for side in ("in", "out"))
    # The number of an MLP's gate multiplies what the MLP reads, which its ups read, too: all that layers add is divided.
    gate, down = _multipliers(hf, "mlp_multipliers", 2)
    added = down / gate
    z, x, b, c, dt = (each * into_mamba for each in _multipliers(hf, "ssm_multipliers", 5))
    mamba = replace(mamba_sizes(hf), has_norm=hf.flag("mamba_rms_norm"), scales=(z, x, b, c, dt))
    scales = (into * out / added, out_of_mamba / added)
    attention_scale = common.head_dim(hf) ** -0.5 * key * into * into
    if not all(_LEAST <= each <= 1 / _LEAST for each in (added, gate, *scales, *mamba.scales, attention_scale)):
        raise hf.error("mlp_multipliers", "numbers whose products with the other multipliers are float32")
    settings = common.settings(hf)
    return replace(
        settings,
        layers=tuple(replace(layer, beside="mamba", mixer_scales=scales, recurrent=mamba) for layer in settings.layers),
        norm_eps=hf.positive("rms_norm_eps", 1e-5),
        wide_norms=True,
        attention_scale=attention_scale,
        embedding_multiplier=hf.positive("embedding_multiplier", 1.0),
        residual_multiplier=added,
        feed_forward_multiplier=gate,
        logit_multiplier=hf.positive("lm_head_multiplier", 1.0),
    )


def mamba2(hf: HFConfig) -> ModelConfig:
    """Mamba-2 and nothing else in each layer, as Codestral Mamba has it."""
    mamba = mamba_alone(hf)
    # No head attends: those of Mamba-2 are what ranks divide.
    unused = {"num_attention_heads": mamba.num_heads, "head_dim": mamba.head_dim, "intermediate_size": 1}
    hf = HFConfig({"max_position_embeddings": 1 << 20, **hf.values, **unused}, hf.source)
    layer = LayerConfig(common.heads(hf), None, None, mixer="mamba", recurrent=mamba, has_feed_forward=False)
    return replace(
        common.settings(hf),
        layers=(layer,) * common.num_layers(hf),
        norm_eps=hf.positive("layer_norm_epsilon", 1e-5),
    )


def nemotron_h(hf: HFConfig) -> ModelConfig:
    """Nemotron-H and Nemotron 3: each layer is Mamba-2, attention, an MLP of squared ReLUs or a mixture of them, alone."""
    for key in ("attention_bias", "mlp_bias", "sliding_window"):
        hf.refuse(key, "no layer of this family has it")
    hf.require(hf.text("mlp_hidden_act", "relu2") == "relu2", "mlp_hidden_act", "relu2, which is without gates")
    head_dim = hf.size("head_dim", hf.size("attention_head_dim", 128))
    layers = one_part_layers(HFConfig({**hf.values, "head_dim": head_dim}, hf.source))
    return replace(
        common.settings(HFConfig({**hf.values, "head_dim": head_dim, "num_hidden_layers": len(layers)}, hf.source)),
        layers=layers,
        norm_eps=hf.positive("layer_norm_epsilon", 1e-5),
        activation=Activation.RELU2,
    )


def qwen3_5(hf: HFConfig) -> ModelConfig:
    """Qwen 3.5: Gated DeltaNet, and in every fourth layer gated attention, of whose heads a quarter is rotated."""
    return _qwen3_5_common(hf, moes=None)


def qwen3_5_moe(hf: HFConfig) -> ModelConfig:
    """Qwen 3.5 with experts: many small ones, and a shared one behind a gate."""
    width = hf.size("moe_intermediate_size", 512)
    hf = HFConfig({"norm_topk_prob": True, "intermediate_size": width, **hf.values}, hf.source)
    moes = qwen_experts(hf, num_experts=256, num_chosen=8, width=width, shared_width=512)
    return _qwen3_5_common(hf, moes=moes)


def qwen3_next(hf: HFConfig) -> ModelConfig:
    """Qwen3-Next: the layers of Qwen 3.5 with experts, whose projections are fused."""
    hf = HFConfig({"norm_topk_prob": True, **hf.values}, hf.source)
    moes = qwen_experts(hf, num_experts=512, num_chosen=10, width=512, shared_width=512)
    return _qwen3_5_common(hf, moes=moes, is_fused=True)


def lfm2(hf: HFConfig) -> ModelConfig:
    """LFM2 and LFM2.5: short convolutions between gates, and attention in some layers."""
    width = hf.size("block_ff_dim", hf.optional_size("intermediate_size") or 12_288)
    if hf.flag("block_auto_adjust_ff_dim", True):
        width = int(2 * width / 3)
        if hf.values.get("block_ffn_dim_multiplier", 1.0) is not None:
            unit = hf.size("block_multiple_of", 256)
            wanted = min(hf.positive("block_ffn_dim_multiplier", 1.0) * width, 2.0**60)  # more is refused as a size
            width = -(-int(wanted) // unit) * unit
    return _lfm2_common(HFConfig({**hf.values, "intermediate_size": width}, hf.source), moes=None)


def lfm2_moe(hf: HFConfig) -> ModelConfig:
    """LFM2 with experts after the first dense layers."""
    return _lfm2_common(HFConfig({"intermediate_size": 7168, **hf.values}, hf.source), moes=lfm2_experts(hf))


def lfm3(hf: HFConfig) -> ModelConfig:
    """LFM3: short convolutions, and attention with a gate for each head, of the last positions or of all."""
    defaults = {"head_dim": 128, "max_position_embeddings": 128_000, "sliding_window": 256}
    hf = HFConfig({**defaults, **hf.values}, hf.source)
    hf.refuse("attention_bias", "no published model of this family has it")
    if not hf.flag("use_sandwich_norm", True):
        raise hf.error("use_sandwich_norm", "true: norms are behind both parts of a layer, too")
    num_layers, kinds = common.num_layers(hf), (_CONV, common.SLIDING, common.FULL)
    types = [common.FULL if i % 4 == 2 else common.SLIDING if i and i % 4 == 0 else _CONV for i in range(num_layers)]
    given, head_gates = hf.section("rope_parameters"), hf.flag("use_attention_gate", True)
    ropes = {
        kind: common.rope_from(hf, given.section(kind) if given.values else HFConfig(rope, hf.source), theta=1e4)
        for kind, rope in _LFM3_ROPES.items()
    }
    attention = LayerConfig(replace(common.heads(hf), has_head_gates=head_gates), None, ropes[common.FULL])
    layers = {
        common.FULL: attention,
        common.SLIDING: replace(attention, window=hf.size("sliding_window"), rope=ropes[common.SLIDING]),
        _CONV: replace(attention, rope=None, mixer="short_conv", recurrent=_short_conv(hf, 7)),
    }
    return replace(
        common.settings(hf),
        layers=tuple(layers[kind] for kind in common.layer_types(hf, types, kinds)),
        norm_eps=hf.positive("norm_eps", 1e-5),
        tied_head=hf.flag("tie_word_embeddings", True),
        norm_placement=NormPlacement.SANDWICH,
        qk_norm=QKNorm.HEAD,
    )


def _short_conv(hf: HFConfig, taps: int) -> ShortConvConfig:
    """Return the sizes of a convolution, by default of so many taps."""
    return ShortConvConfig(
        channels=hf.size("hidden_size"), kernel=common.taps(hf, "conv_L_cache", taps), has_bias=hf.flag("conv_bias")
    )


def _qwen3_5_common(hf: HFConfig, *, moes: Mixtures | None, is_fused: bool = False) -> ModelConfig:
    """Return the settings that Qwen 3.5 has with experts and without, and Qwen3-Next."""
    hf = HFConfig({"partial_rotary_factor": 0.25, **hf.values}, hf.source)
    every = hf.size("full_attention_interval", 4)
    types = [_LINEAR if (i + 1) % every else common.FULL for i in range(common.num_layers(hf))]
    delta = DeltaConfig(
        num_k_heads=hf.size("linear_num_key_heads", 16),
        num_v_heads=hf.size("linear_num_value_heads", 32),
        k_dim=hf.size("linear_key_head_dim", 128),
        v_dim=hf.size("linear_value_head_dim", 128),
        kernel=common.taps(hf, "linear_conv_kernel_dim", 4),
        is_tiled=hf.flag("linear_value_heads_tiled") and not is_fused,
        has_fused_rows=is_fused and not hf.flag("linear_rows_split"),
        has_fused_gates=is_fused,
    )
    if delta.num_v_heads % delta.num_k_heads:
        raise hf.error("linear_num_value_heads", f"a multiple of linear_num_key_heads, {delta.num_k_heads}")
    if delta.has_fused_rows and delta.channels + delta.num_v_heads * (delta.v_dim + 2) > 4 * common.MOST_OF_ROW:
        raise hf.error(
            "linear_num_value_heads", f"fewer: a row of all heads has at most {4 * common.MOST_OF_ROW} numbers"
        )
    if common.activation(hf, "hidden_act", "silu") is not Activation.SILU:
        raise hf.error("hidden_act", "silu, which the convolution has too")
    hf.require(hf.flag("attn_output_gate", True), "attn_output_gate", "true")
    layers = [replace(layer, heads=replace(layer.heads, is_gated=True)) for layer in common.layers(hf, moes=moes)]
    is_linear = [kind == _LINEAR for kind in common.layer_types(hf, types, (_LINEAR, common.FULL))]
    return replace(
        common.settings(hf),
        norm_offset=True,
        qk_norm=QKNorm.HEAD,
        layers=_mixing(layers, is_linear, "delta", delta),
        num_mtp_layers=common.num_mtp_layers(hf),
    )


def _multipliers(hf: HFConfig, key: str, num: int) -> tuple[float, ...]:
    """Return so many numbers above 0, or ones if the key is absent."""
    found = hf.numbers(key) if hf.has(key) else (1.0,) * num
    hf.require(len(found) == num and min(found) > 0, key, f"{num} numbers above 0")
    return found


def _lfm2_common(hf: HFConfig, *, moes: Mixtures | None) -> ModelConfig:
    """Return the settings that LFM2 has with experts and without."""
    hf = HFConfig({"max_position_embeddings": 128_000, **hf.values}, hf.source)
    num_layers = common.num_layers(hf)
    attending = hf.numbers("full_attn_idxs") if hf.has("full_attn_idxs") else range(num_layers)
    types = common.layer_types(
        hf, [common.FULL if i in attending else _CONV for i in range(num_layers)], (_CONV, common.FULL)
    )
    layers = common.layers(hf, ropes=[common.rope(hf, theta=1_000_000.0)] * num_layers, moes=moes)
    return replace(
        common.settings(hf),
        layers=_mixing(layers, [kind == _CONV for kind in types], "short_conv", _short_conv(hf, 3)),
        norm_eps=hf.positive("norm_eps", 1e-5),
        tied_head=hf.flag("tie_embedding", hf.flag("tie_word_embeddings", True)),
        qkv_bias=False,
        o_bias=False,
        qk_norm=QKNorm.HEAD,
    )
