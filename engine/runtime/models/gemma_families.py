"""The generations of Gemma, each as its differences from the others; see families.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.files.hf_config import HFConfig
from engine.runtime.activation import Activation
from engine.runtime.layers.model_config import (
    AltUpConfig,
    LayerConfig,
    ModelConfig,
    NormPlacement,
    QKNorm,
)
from engine.runtime.models import common_settings as common
from engine.runtime.models.expert_settings import gemma4_experts

_MOST_STREAMS = 16  # as many numbers, squared, are on a stack of the native library
_GEMMA4_ROPES = {
    common.SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    common.FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def gemma(hf: HFConfig) -> ModelConfig:
    """Gemma 1."""
    # The first Gemma checkpoints say "gelu" for its tanh approximation.
    return replace(_gemma_common(hf), activation=Activation.GELU_TANH)


def gemma2(hf: HFConfig) -> ModelConfig:
    """Gemma 2: windows on every other layer, soft caps, norms on both sides."""
    types = [common.FULL if i % 2 else common.SLIDING for i in range(common.num_layers(hf))]
    return replace(
        _gemma_common(hf),
        activation=common.activation(hf, "hidden_activation", "gelu_pytorch_tanh"),
        norm_placement=NormPlacement.SANDWICH,
        attention_scale=hf.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        # null switches a cap off, absence means the family's default
        attention_softcap=hf.optional_positive("attn_logit_softcapping")
        if "attn_logit_softcapping" in hf.values
        else 50.0,
        logit_softcap=hf.optional_positive("final_logit_softcapping")
        if "final_logit_softcapping" in hf.values
        else 30.0,
        layers=common.layers(hf, windows=common.windows(hf, types)),
    )


def gemma3(hf: HFConfig) -> ModelConfig:
    """Gemma 3's text model: five window layers with a short rope base to one full layer."""
    if hf.flag("use_bidirectional_attention"):
        return common.both_ways(gemma3(HFConfig({**hf.values, "use_bidirectional_attention": False}, hf.source)))
    period = hf.size("sliding_window_pattern", 6)
    types = [common.SLIDING if (i + 1) % period else common.FULL for i in range(common.num_layers(hf))]
    ropes = common.ropes_by_type(
        hf, types, local_theta=hf.positive("rope_local_base_freq", 10_000.0), theta=1_000_000.0
    )
    return replace(
        _gemma_common(hf),
        activation=common.activation(hf, "hidden_activation", "gelu_pytorch_tanh"),
        norm_placement=NormPlacement.SANDWICH,
        qk_norm=QKNorm.HEAD,
        attention_scale=hf.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        logit_softcap=hf.optional_positive("final_logit_softcapping"),
        layers=common.layers(hf, windows=common.windows(hf, types), ropes=ropes),
    )


def gemma4(hf: HFConfig) -> ModelConfig:
    """Gemma 4's text model: wider heads in full layers, shared keys and values, inputs of layers, experts."""
    return _gemma4_common(hf, layer_inputs=hf.integer("hidden_size_per_layer_input", 256))


def gemma4_unified(hf: HFConfig) -> ModelConfig:
    """Gemma 4's text model where one decoder takes in images and sound: dense, without inputs of layers."""
    return _gemma4_common(HFConfig({"sliding_window": 1024, **hf.values}, hf.source), layer_inputs=0)


def gemma3n(hf: HFConfig) -> ModelConfig:
    """Gemma 3n's text model: several residual streams, inputs of layers, shared keys and values, sparse gates."""
    num_layers = common.num_layers(hf)
    types = common.layer_types(hf, [common.SLIDING if (i + 1) % 5 else common.FULL for i in range(num_layers)])
    hf.require(not hf.integer("altup_active_idx", 0), "altup_active_idx", "0")
    widths = [*hf.numbers("intermediate_size")] if isinstance(hf.values.get("intermediate_size"), list) else []
    hf.require(all(each >= 1 and each.is_integer() for each in widths), "intermediate_size", "integers of at least 1")
    hf.require(2 <= hf.integer("altup_num_inputs", 4) <= _MOST_STREAMS, "altup_num_inputs", f"2 to {_MOST_STREAMS}")
    hf = HFConfig({**hf.values, **({"intermediate_size": int(max(widths))} if widths else {})}, hf.source)
    sparse = [0.95] * (10 if num_layers > 10 else 0) + [0.0] * num_layers
    if hf.has("activation_sparsity_pattern"):
        sparse = [*hf.numbers("activation_sparsity_pattern")]
    if len(sparse) < num_layers or len(widths) not in (0, num_layers) or not all(0 <= each < 1 for each in sparse):
        raise hf.error("activation_sparsity_pattern", f"{num_layers} shares below 1, and as many widths of MLPs")
    ropes = common.ropes_by_type(
        hf, types, local_theta=hf.positive("rope_local_base_freq", 10_000.0), theta=1_000_000.0
    )
    layers = common.layers(
        HFConfig({"sliding_window": 512, **hf.values}, hf.source), windows=common.windows(hf, types), ropes=ropes
    )
    sources = _sources(hf, types, hf.integer("num_kv_shared_layers", 15))
    return replace(
        common.settings(hf),
        layers=tuple(
            replace(layer, source=sources[i], width=int(widths[i]) if widths else None, sparsity=sparse[i])
            for i, layer in enumerate(layers)
        ),
        tied_head=hf.flag("tie_word_embeddings", True),
        activation=common.activation(hf, "hidden_activation", "gelu_pytorch_tanh"),
        embedding_multiplier=hf.size("hidden_size") ** 0.5,
        attention_scale=1.0,
        qk_norm=QKNorm.HEAD,
        value_norm=True,
        wide_norms=True,
        logit_softcap=hf.optional_positive("final_logit_softcapping")
        if "final_logit_softcapping" in hf.values
        else 30.0,
        layer_inputs=hf.size("hidden_size_per_layer_input", 256),
        num_input_rows=hf.size("vocab_size_per_layer_input", 262_144),
        altup=AltUpConfig(
            num_streams=hf.integer("altup_num_inputs", 4),
            rank=hf.size("laurel_rank", 64),
            scales_output=hf.flag("altup_correct_scale", True),
        ),
    )


def _gemma_common(hf: HFConfig) -> ModelConfig:
    """Return the settings that the generations of Gemma share."""
    hf.refuse("use_bidirectional_attention", "generation needs causal attention")
    return replace(
        common.settings(hf),
        tied_head=hf.flag("tie_word_embeddings", True),
        norm_offset=True,
        embedding_multiplier=hf.size("hidden_size") ** 0.5,
    )


def _gemma4_common(hf: HFConfig, *, layer_inputs: int) -> ModelConfig:
    """Return the settings that the kinds of Gemma 4 share."""
    if hf.values.get("use_bidirectional_attention") == "all":
        raise hf.error("use_bidirectional_attention", "null or 'vision': generation needs causal attention")
    if layer_inputs and hf.size("vocab_size_per_layer_input", hf.size("vocab_size")) != hf.size("vocab_size"):
        raise hf.error("vocab_size_per_layer_input", "that of the model")
    values = {key: value for key, value in hf.values.items() if value is not None}
    num_layers = common.num_layers(hf)
    hf = HFConfig({"rope_parameters": _GEMMA4_ROPES, **values}, hf.source)
    types = [common.SLIDING if (i + 1) % 6 else common.FULL for i in range(num_layers)]
    types = [*common.layer_types(hf, types)[:-1], common.FULL]  # the last has full attention in any case
    full = _with_full_heads(HFConfig({**hf.values, "layer_types": types}, hf.source))
    moes = gemma4_experts(hf, common.activation(hf, "hidden_activation", "gelu_pytorch_tanh"))
    sources, layers = _sources(hf, types, hf.integer("num_kv_shared_layers", 0)), list[LayerConfig]()
    for index, kind in enumerate(types):
        source = sources[index]
        is_wide = source is not None and hf.flag("use_double_wide_mlp")
        own, window = (full, None) if kind == common.FULL else (hf, hf.size("sliding_window", 512))
        rope = common.rope_from(own, own.section("rope_parameters").section(kind), theta=10_000.0)
        width = 2 * hf.size("intermediate_size") if is_wide else None
        heads = replace(common.heads(own), values_are_keys=kind == common.FULL and hf.flag("attention_k_eq_v"))
        is_causal = kind == common.FULL  # images attend both ways in windows alone, if at all
        layers.append(LayerConfig(heads, window, rope, moes[index], source=source, width=width, is_causal=is_causal))
    return replace(
        common.settings(hf),
        layers=tuple(layers),
        tied_head=hf.flag("tie_word_embeddings", True),
        activation=common.activation(hf, "hidden_activation", "gelu_pytorch_tanh"),
        embedding_multiplier=hf.size("hidden_size") ** 0.5,
        norm_placement=NormPlacement.SANDWICH,
        attention_scale=1.0,
        qk_norm=QKNorm.HEAD,
        value_norm=True,
        wide_norms=True,
        logit_softcap=hf.optional_positive("final_logit_softcapping"),
        layer_inputs=layer_inputs,
        has_layer_scale=True,
    )


def _sources(hf: HFConfig, types: Sequence[str], num_shared: int) -> list[int | None]:
    """Return the layer whose keys and values each of the last layers reads: the last of its kind that has its own."""
    num_own = len(types) - num_shared
    found = [max((i for i in range(num_own) if types[i] == kind), default=-1) for kind in types[max(num_own, 0) :]]
    if num_shared < 0 or num_own < 1 or -1 in found:
        raise hf.error("num_kv_shared_layers", "fewer, so that a layer of each kind has keys and values")
    return [*[None] * num_own, *found]


def _with_full_heads(hf: HFConfig) -> HFConfig:
    """Return the config with the heads of layers with full attention: transformers writes them layer by layer since 5.23."""
    if hf.has("per_layer_config"):
        given = hf.section("per_layer_config")
        found = {key.lstrip("0") or "0": given.section(key).values for key in given.values}  # "05" of 12 layers
        full = [str(index) for index, kind in enumerate(hf.texts("layer_types")) if kind == common.FULL]
        own = found.get(full[0], {})
        if len(found) < len(given.values) or found != (dict.fromkeys(full, own) if found else {}):
            raise hf.error("per_layer_config", "the same for all layers with full attention, and nothing for others")
        return HFConfig({**hf.values, **own}, hf.source)
    heads = {"head_dim": hf.size("global_head_dim", 512)}
    if hf.flag("attention_k_eq_v") and hf.has("num_global_key_value_heads"):
        heads["num_key_value_heads"] = hf.size("num_global_key_value_heads")
    return HFConfig({**hf.values, **heads}, hf.source)
