"""The model families of the Llama lineage, each as its differences from the others.

A new family is one function, one line in FAMILIES and one tiny-config test; those with recurrent layers are in
recurrent_families.py, Gemma's in gemma_families.py. It takes what all spell alike from common_settings.py and never calls another family. A family
refuses by name every setting that it does not implement and that would change the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

from engine.core.errors import ModelLoadError
from engine.files.hf_config import HFConfig
from engine.runtime.layers.model_config import (
    HeadsConfig,
    LatentConfig,
    Mixtures,
    ModelConfig,
    NormPlacement,
    QKNorm,
)
from engine.runtime.models import common_settings as common
from engine.runtime.models.expert_settings import (
    deepseek_v2_experts,
    deepseek_v3_experts,
    glm4_experts,
    glm4_lite_experts,
    gpt_oss_experts,
    granite_experts,
    mixtral_experts,
    olmoe_experts,
    qwen_experts,
)

Family = Callable[[HFConfig], ModelConfig]

_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


_KV_HEADS, _HEAD = "num_key_value_heads", "head_dim"
# What transformers takes for settings that a config.json leaves out, where a family differs from Llama.
_LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    **{kind: {_KV_HEADS: 4} for kind in ("smollm3", "granite_swa", "qwen3_moe", "lfm3")},
    **{kind: {_KV_HEADS: 8} for kind in ("bamba", "glm4_moe", "gpt_oss", "lfm2", "lfm2_moe", "mixtral", "nemotron_h")},
    **{kind: {_KV_HEADS: 4, _HEAD: 256} for kind in ("gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text")},
    **{kind: {_KV_HEADS: 2, _HEAD: 256} for kind in ("gemma3n_text", "qwen3_next", "qwen3_5_moe_text")},
    **{kind: {"rms_norm_eps": 1e-5} for kind in ("olmo2", "olmo3", "phi3")},
    "falcon_h1": {_KV_HEADS: 8, "mamba_d_head": 128},
    "gemma": {_KV_HEADS: 16, _HEAD: 256},
    "mistral": {_KV_HEADS: 8, "sliding_window": 4096},
    "qwen2": {_KV_HEADS: 32, "sliding_window": 4096},
    "qwen2_moe": {_KV_HEADS: 16},
    "qwen3": {_KV_HEADS: 32, _HEAD: 128},
    "qwen3_5_text": {_KV_HEADS: 4, _HEAD: 256},
}


def read_config(values: Mapping[str, Any], source: str) -> ModelConfig:
    """Return the ModelConfig of a config.json; `source` is named in errors."""
    hf = HFConfig(values, source)
    hf.require(hf.text("model_type") in FAMILIES, "model_type", f"one of {', '.join(FAMILIES)}")
    left_out = _LEFT_OUT.get(hf.text("model_type"), {})
    config = family_of(hf.text("model_type"))(HFConfig({**left_out, **values}, source))
    for heads in {layer.heads for layer in config.layers}:
        if heads.num_heads % heads.num_kv_heads:
            raise ModelLoadError(
                f"{source}: {heads.num_heads} attention heads cannot share {heads.num_kv_heads} key/value heads evenly."
            )
    return config


def family_of(model_type: str) -> Family:
    """Return the family of a model type in FAMILIES."""
    found = FAMILIES[model_type]
    if callable(found):
        return found
    return resolve_name(f"engine.runtime.models.{found}")


def llama(hf: HFConfig) -> ModelConfig:
    """Llama 1 to 3.3, SmolLM2, and other models of the same architecture."""
    return replace(common.settings(hf), mlp_bias=hf.flag("mlp_bias"))


def mistral(hf: HFConfig) -> ModelConfig:
    """Mistral, with a window on every layer or on none."""
    return replace(
        common.settings(hf),
        layers=common.layers(hf, windows=[hf.optional_size("sliding_window")] * common.num_layers(hf)),
    )


def qwen2(hf: HFConfig) -> ModelConfig:
    """Qwen 1.5, 2 and 2.5."""
    return replace(
        common.settings(hf), qkv_bias=True, o_bias=False, layers=common.layers(hf, windows=_qwen_windows(hf))
    )


def qwen3(hf: HFConfig) -> ModelConfig:
    """Qwen 3: norms over each head's queries and keys."""
    return replace(common.settings(hf), qk_norm=QKNorm.HEAD, layers=common.layers(hf, windows=_qwen_windows(hf)))


def smollm3(hf: HFConfig) -> ModelConfig:
    """SmolLM3: every fourth layer has no positions; only those may have a window."""
    num_layers, every = common.num_layers(hf), hf.size("no_rope_layer_interval", 4)
    turned = hf.numbers("no_rope_layers") if hf.has("no_rope_layers") else [(i + 1) % every for i in range(num_layers)]
    hf.require(len(turned) == num_layers, "no_rope_layers", f"{num_layers} entries, one a layer")
    windows: list[int | None] = [None] * num_layers
    if hf.flag("use_sliding_window"):
        windows = common.windows(hf, [common.FULL if flag else common.SLIDING for flag in turned])
    rope = common.rope(hf, theta=2_000_000.0)
    return replace(
        common.settings(hf),
        mlp_bias=hf.flag("mlp_bias"),
        tied_head=hf.flag("tie_word_embeddings", True),
        layers=common.layers(hf, windows=windows, ropes=[rope if flag else None for flag in turned]),
    )


def phi3(hf: HFConfig) -> ModelConfig:
    """Phi-3, Phi-3.5 and Phi-4 (mini and full)."""
    hf = _with_longrope(hf)
    windows = [hf.optional_size("sliding_window")] * common.num_layers(hf)
    return replace(common.settings(hf), merged_checkpoint=True, layers=common.layers(hf, windows=windows))


def eurobert(hf: HFConfig) -> ModelConfig:
    """EuroBERT: Llama that attends both ways."""
    return common.both_ways(llama(HFConfig({"rms_norm_eps": 1e-5, **hf.values}, hf.source)))


def granite(hf: HFConfig) -> ModelConfig:
    """Llama with four multipliers."""
    return replace(granite_settings(hf), mlp_bias=hf.flag("mlp_bias"))


def olmo2(hf: HFConfig) -> ModelConfig:
    """Norms after attention and MLP, and over whole queries and keys."""
    return replace(common.settings(hf), norm_placement=NormPlacement.POST, qk_norm=QKNorm.FULL)


def olmo3(hf: HFConfig) -> ModelConfig:
    """OLMo 2 with windows on three layers of four; only full layers scale their rope."""
    types = [common.SLIDING if (i + 1) % 4 else common.FULL for i in range(common.num_layers(hf))]
    theta = hf.positive("rope_theta", 500_000.0)
    ropes = common.ropes_by_type(hf, types, local_theta=theta, theta=theta)
    return replace(
        common.settings(hf),
        norm_placement=NormPlacement.POST,
        qk_norm=QKNorm.FULL,
        layers=common.layers(hf, windows=common.windows(hf, types), ropes=ropes),
    )


def deepseek_v2(hf: HFConfig) -> ModelConfig:
    """DeepSeek V2 and V2-Lite."""
    hf.refuse("mlp_bias", "experts and MLPs of this family have no bias")
    return _latent_common(hf, deepseek_v2_experts(hf), is_interleaved=True)


def deepseek_v3(hf: HFConfig) -> ModelConfig:
    """DeepSeek V3, R1 and Kimi K2."""
    return _latent_common(hf, deepseek_v3_experts(hf), is_interleaved=hf.flag("rope_interleave", True))


def qwen2_moe(hf: HFConfig) -> ModelConfig:
    """Qwen 1.5 and 2 with experts: one shared expert behind a gate."""
    moes = qwen_experts(hf, num_experts=60, num_chosen=4, width=1408, shared_width=5632)
    layers = common.layers(hf, windows=_qwen_windows(hf), moes=moes)
    return replace(common.settings(hf), qkv_bias=hf.flag("qkv_bias", True), o_bias=False, layers=layers)


def qwen3_moe(hf: HFConfig) -> ModelConfig:
    """Qwen 3 with experts, such as Qwen3-30B-A3B."""
    moes = qwen_experts(hf, num_experts=128, num_chosen=8, width=768)
    return replace(
        common.settings(hf), qk_norm=QKNorm.HEAD, layers=common.layers(hf, windows=_qwen_windows(hf), moes=moes)
    )


def mixtral(hf: HFConfig) -> ModelConfig:
    """Mistral with experts in every layer."""
    windows = [hf.optional_size("sliding_window")] * common.num_layers(hf)
    ropes = [common.rope(hf, theta=1_000_000.0)] * common.num_layers(hf)
    layers = common.layers(hf, windows=windows, ropes=ropes, moes=mixtral_experts(hf))
    return replace(common.settings(hf), norm_eps=hf.positive("rms_norm_eps", 1e-5), layers=layers)


def olmoe(hf: HFConfig) -> ModelConfig:
    """OLMoE: norms over whole queries and keys, which may be clipped then."""
    return replace(
        common.settings(hf),
        norm_eps=hf.positive("rms_norm_eps", 1e-5),
        qk_norm=QKNorm.FULL,
        qkv_clip=hf.optional_positive("clip_qkv"),
        layers=common.layers(hf, moes=olmoe_experts(hf)),
    )


def granitemoe(hf: HFConfig) -> ModelConfig:
    """Granite with experts in every layer."""
    return replace(granite_settings(hf), layers=common.layers(hf, moes=mixtral_experts(hf)))


def granitemoeshared(hf: HFConfig) -> ModelConfig:
    """Granite with experts and a shared expert in every layer."""
    return replace(granite_settings(hf), layers=common.layers(hf, moes=granite_experts(hf, shared_width=0)))


def granite_swa(hf: HFConfig) -> ModelConfig:
    """Granite with attention sinks, a window on three layers of four, and a rope base for each layer."""
    return _granite_swa_common(HFConfig({"tie_word_embeddings": True, "rms_norm_eps": 1e-5, **hf.values}, hf.source))


def granitemoe_swa(hf: HFConfig) -> ModelConfig:
    """The same with experts in every layer."""
    return _granite_swa_common(hf, granite_experts(hf, shared_width=0))


def gpt_oss(hf: HFConfig) -> ModelConfig:
    """gpt-oss: attention sinks, windows on even layers, biases, and a clamped activation."""
    types = [common.FULL if i % 2 else common.SLIDING for i in range(common.num_layers(hf))]
    bias, head_dim = hf.flag("attention_bias", True), hf.size("head_dim", 64)
    values = {"sliding_window": 128, **hf.values, "head_dim": head_dim}
    if not (hf.has("rope_parameters") or hf.has("rope_scaling")):
        values["rope_scaling"] = _GPT_OSS_ROPE
    hf = HFConfig(values, hf.source)
    ropes = [common.rope(hf, theta=150_000.0)] * common.num_layers(hf)
    return replace(
        common.settings(hf),
        norm_eps=hf.positive("rms_norm_eps", 1e-5),
        qkv_bias=bias,
        o_bias=bias,
        has_sinks=True,
        layers=common.layers(hf, windows=common.windows(hf, types), ropes=ropes, moes=gpt_oss_experts(hf)),
    )


def glm4_moe(hf: HFConfig) -> ModelConfig:
    """GLM-4.5: half of each head is rotated; experts after the first dense layers."""
    hf = HFConfig({"partial_rotary_factor": 0.5, **hf.values}, hf.source)
    return replace(
        common.settings(hf),
        norm_eps=hf.positive("rms_norm_eps", 1e-5),
        o_bias=False,
        qk_norm=QKNorm.HEAD if hf.flag("use_qk_norm") else QKNorm.NONE,
        layers=common.layers(hf, moes=glm4_experts(hf)),
        num_mtp_layers=common.num_mtp_layers(hf),
    )


def glm4_moe_lite(hf: HFConfig) -> ModelConfig:
    """GLM-4.7-Flash: DeepSeek's attention, GLM's experts."""
    sizes = {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5}
    hf = HFConfig({**sizes, **hf.values}, hf.source)
    return _latent_common(hf, glm4_lite_experts(hf), is_interleaved=hf.flag("rope_interleave", True))


# By model type. A name is that of a function beside this file, which is imported where a model needs it.
FAMILIES: Mapping[str, Family | str] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "smollm3": smollm3,
    "phi3": phi3,
    "gemma": "gemma_families:gemma",
    "gemma2": "gemma_families:gemma2",
    "gemma3_text": "gemma_families:gemma3",
    "eurobert": eurobert,
    "granite": granite,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "glm4_moe_lite": glm4_moe_lite,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "mixtral": mixtral,
    "olmoe": olmoe,
    "granitemoe": granitemoe,
    "granitemoeshared": granitemoeshared,
    "granitemoehybrid": "recurrent_families:granitemoehybrid",
    "granite_swa": granite_swa,
    "granitemoe_swa": granitemoe_swa,
    "bamba": "recurrent_families:bamba",
    "falcon_h1": "recurrent_families:falcon_h1",
    "mamba2": "recurrent_families:mamba2",
    "nemotron_h": "recurrent_families:nemotron_h",
    "gpt_oss": gpt_oss,
    "glm4_moe": glm4_moe,
    "qwen3_5_text": "recurrent_families:qwen3_5",
    "qwen3_5_moe_text": "recurrent_families:qwen3_5_moe",
    "qwen3_next": "recurrent_families:qwen3_next",
    "lfm2": "recurrent_families:lfm2",
    "lfm2_moe": "recurrent_families:lfm2_moe",
    "lfm3": "recurrent_families:lfm3",
    "gemma3n_text": "gemma_families:gemma3n",
    "gemma4_text": "gemma_families:gemma4",
    "gemma4_unified_text": "gemma_families:gemma4_unified",
}


def granite_settings(hf: HFConfig) -> ModelConfig:
    """Return the settings that the generations of Granite share."""
    return replace(
        common.settings(hf),
        embedding_multiplier=hf.number("embedding_multiplier", 1.0),
        residual_multiplier=hf.number("residual_multiplier", 1.0),
        attention_scale=hf.number("attention_multiplier", 1.0),
        logit_multiplier=1.0 / hf.positive("logits_scaling", 1.0),
    )


def _granite_swa_common(hf: HFConfig, moes: Mixtures | None = None) -> ModelConfig:
    """Return the settings that Granite with windows has with experts and without."""
    hf, rope, num_layers = (
        HFConfig({"sliding_window": 128, **hf.values}, hf.source),
        common.rope(hf),
        common.num_layers(hf),
    )
    thetas = hf.numbers("layer_rope_theta") if hf.has("layer_rope_theta") else [rope.theta] * num_layers
    if len(thetas) != num_layers or min(thetas) < 0:
        raise hf.error("layer_rope_theta", f"{num_layers} numbers, 0 for a layer without positions")
    windows = common.windows(hf, [common.SLIDING if i % 4 else common.FULL for i in range(num_layers)])
    ropes = [replace(rope, theta=theta) if theta else None for theta in thetas]
    layers = common.layers(hf, windows=windows, ropes=ropes, moes=moes)
    return replace(granite_settings(hf), mlp_bias=hf.flag("mlp_bias"), has_sinks=True, layers=layers)


def _latent_common(hf: HFConfig, moes: Mixtures, *, is_interleaved: bool) -> ModelConfig:
    """Return the settings that the families with latent attention share."""
    latent = LatentConfig(
        rank=hf.size("kv_lora_rank", 512, common.MOST_OF_ROW),
        nope_dim=hf.size("qk_nope_head_dim", 128),
        rope_dim=hf.size("qk_rope_head_dim", 64, common.MOST_OF_ROW),
        value_dim=hf.size("v_head_dim", 128),
        query_rank=hf.optional_size("q_lora_rank") if "q_lora_rank" in hf.values else 1536,
        is_interleaved=is_interleaved,
        has_split_kv=hf.flag("kv_b_split"),
    )
    if latent.query_rank is None:
        hf.refuse("attention_bias", "queries without q_lora_rank have none, and share their matrix with latents")
    num_heads, row = hf.size("num_attention_heads"), latent.rank + latent.rope_dim
    heads = HeadsConfig(num_heads=num_heads, num_kv_heads=1, head_dim=row, latent=latent)
    # Only the rotated dimensions of a head have positions.
    rotated = HFConfig({**hf.values, "head_dim": latent.rope_dim, "num_key_value_heads": 1}, hf.source)
    return replace(
        common.settings(rotated),
        layers=tuple(replace(layer, heads=heads, mixer="latent") for layer in common.layers(rotated, moes=moes)),
        attention_scale=(latent.nope_dim + latent.rope_dim) ** -0.5 * _yarn_growth(hf) ** 2,
        num_mtp_layers=common.num_mtp_layers(hf),
    )


def _yarn_growth(hf: HFConfig) -> float:
    """Return the factor by which DeepSeek's YaRN lengthens queries and keys, beside cos and sin."""
    params = hf.section("rope_parameters" if hf.has("rope_parameters") else "rope_scaling")
    kind, mscale = params.text("rope_type", params.text("type", "default")), params.number("mscale_all_dim", 0.0)
    factor = 1.0 if kind == "default" or not mscale else params.positive("factor")
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _qwen_windows(hf: HFConfig) -> list[int | None]:
    if not (hf.flag("use_sliding_window") and hf.has("sliding_window")):
        return [None] * common.num_layers(hf)
    first = hf.integer("max_window_layers", 28)
    return common.windows(hf, [common.SLIDING if i >= first else common.FULL for i in range(common.num_layers(hf))])


def _with_longrope(hf: HFConfig) -> HFConfig:
    """Return a config whose scaling has one name: Phi-3 calls LongRoPE "su" or "yarn", too."""
    key = "rope_parameters" if hf.has("rope_parameters") else "rope_scaling"
    params = hf.section(key)
    if params.text("rope_type", params.text("type", "default")) != "yarn":
        return hf
    return HFConfig({**hf.values, key: {**params.values, "rope_type": "longrope"}}, hf.source)
