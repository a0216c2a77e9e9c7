"""The model families with recurrent layers, as those of families.py; imported where a model is of one."""

from __future__ import annotations

from dataclasses import replace

from engine.files.hf_config import HFConfig
from engine.runtime.activation import Activation
from engine.runtime.layers.model_config import (
    DeltaConfig,
    LayerConfig,
    ModelConfig,
    NormPlacement,
    QKNorm,
    ShortConvConfig,
)
from engine.runtime.models import common_settings as common
from engine.runtime.models.expert_settings import Mixtures, granite_experts, lfm2_experts, qwen_experts
from engine.runtime.models.families import granite_settings
from engine.runtime.models.mamba_settings import mamba_alone, mamba_sizes, one_part_layers, with_mamba

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
    if hf.text("mlp_hidden_act", "relu2") != "relu2":
        raise hf.error("mlp_hidden_act", "relu2, which is without gates")
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
    if not hf.flag("attn_output_gate", True):
        raise hf.error("attn_output_gate", "true")
    layers = [replace(layer, heads=replace(layer.heads, is_gated=True)) for layer in common.layers(hf, moes=moes)]
    for index, kind in enumerate(common.layer_types(hf, types, (_LINEAR, common.FULL))):
        if kind == _LINEAR:
            layers[index] = replace(layers[index], rope=None, mixer="delta", recurrent=delta)
    return replace(
        common.settings(hf),
        norm_offset=True,
        qk_norm=QKNorm.HEAD,
        layers=tuple(layers),
        num_mtp_layers=common.num_mtp_layers(hf),
    )


def _multipliers(hf: HFConfig, key: str, num: int) -> tuple[float, ...]:
    """Return so many numbers above 0, or ones if the key is absent."""
    found = hf.numbers(key) if hf.has(key) else (1.0,) * num
    if len(found) != num or min(found) <= 0:
        raise hf.error(key, f"{num} numbers above 0")
    return found


def _lfm2_common(hf: HFConfig, *, moes: Mixtures | None) -> ModelConfig:
    """Return the settings that LFM2 has with experts and without."""
    hf = HFConfig({"max_position_embeddings": 128_000, **hf.values}, hf.source)
    num_layers = common.num_layers(hf)
    attending = hf.numbers("full_attn_idxs") if hf.has("full_attn_idxs") else range(num_layers)
    types = common.layer_types(
        hf, [common.FULL if i in attending else _CONV for i in range(num_layers)], (_CONV, common.FULL)
    )
    conv = _short_conv(hf, 3)
    layers = list(common.layers(hf, ropes=[common.rope(hf, theta=1_000_000.0)] * num_layers, moes=moes))
    for index, kind in enumerate(types):
        if kind == _CONV:
            layers[index] = replace(layers[index], rope=None, mixer="short_conv", recurrent=conv)
    return replace(
        common.settings(hf),
        layers=tuple(layers),
        norm_eps=hf.positive("norm_eps", 1e-5),
        tied_head=hf.flag("tie_embedding", hf.flag("tie_word_embeddings", True)),
        qkv_bias=False,
        o_bias=False,
        qk_norm=QKNorm.HEAD,
    )
