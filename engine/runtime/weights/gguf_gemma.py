"""Rewrites GGUF metadata of Gemma's generations, as gguf_config.py does that of others."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

from engine.runtime.weights.gguf_config import File, experts, same_in_all_layers, window_pattern, windowed

_UNTURNED = 1e20  # a factor of a rotation that llama.cpp divides a frequency by, so that it does not turn


def by_kind_of_layer(values: dict[str, Any], source: str) -> dict[str, Any]:
    """Return Gemma 4's metadata with a number for each kind of layers in place of lists. Raises ModelLoadError."""
    found, windows = dict(values), values.get("attention.sliding_window_pattern")
    heads, widths = values.get("attention.head_count_kv"), values.get("feed_forward_length")
    if isinstance(heads, list) and isinstance(windows, list) and len(heads) == len(windows):
        for key, kind in (("attention.head_count_kv", True), ("attention.head_count_kv_full", False)):
            own = [num for num, has_window in zip(heads, windows, strict=True) if bool(has_window) == kind] or heads
            found[key] = same_in_all_layers({"attention.head_count_kv": own}, source)["attention.head_count_kv"]
    num_shared = values.get("attention.shared_kv_layers", 0)
    if isinstance(widths, list) and widths and isinstance(num_shared, int):
        wide = [2 * widths[0] if i >= len(widths) - num_shared else widths[0] for i in range(len(widths))]
        if widths == wide:  # else they are all equal, or the model is refused
            found |= {"feed_forward_length": widths[0], "double_wide": bool(num_shared)}
    return found


def _query_scalar(file: File, num_layers_27b: int) -> float:
    """Return the query scale: the mean head width for 27B models, head_dim for others."""
    meta = file.meta
    hidden, heads = meta.size("embedding_length"), meta.size("attention.head_count")
    large = meta.size("block_count") == num_layers_27b
    return hidden / heads if large else float(meta.size("attention.key_length", hidden // heads))


def gemma2(file: File) -> dict[str, Any]:
    return {
        **windowed(file),
        "query_pre_attn_scalar": _query_scalar(file, 46),
        "attn_logit_softcapping": file.meta.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.meta.number("final_logit_softcapping", 30.0),
    }


def gemma3(file: File) -> dict[str, Any]:
    return {
        **windowed(file),
        "query_pre_attn_scalar": _query_scalar(file, 62),
        "rope_theta": file.meta.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": file.meta.number("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": file.meta.optional_number("final_logit_softcapping"),
    }


def gemma3n(file: File) -> dict[str, Any]:
    meta, deviations = file.meta, file.meta.values.get("activation_sparsity_scale")
    sparsity = {}
    if deviations is not None:  # of a normal distribution, from its mean; -inf where all gates stay
        if not isinstance(deviations, list) or not all(isinstance(each, float) for each in deviations):
            raise meta.error("activation_sparsity_scale", "a list of numbers")
        sparsity = {"activation_sparsity_pattern": [NormalDist().cdf(each) for each in deviations]}
    return {
        **windowed(file),
        "rope_theta": meta.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": meta.number("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": meta.number("final_logit_softcapping", 30.0),
        "num_kv_shared_layers": meta.integer("attention.shared_kv_layers", meta.size("block_count") - 20),
        "hidden_size_per_layer_input": meta.size("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": file.shapes.get("per_layer_token_embd.weight", (1,))[0],
        "altup_num_inputs": meta.size("altup.num_inputs"),
        "altup_active_idx": meta.integer("altup.active_idx", 0),
        "laurel_rank": file.shapes.get("blk.0.laurel_l.weight", (1,))[0],
        **sparsity,
    }


def gemma4(file: File) -> dict[str, Any]:
    meta, factors = file.meta, file.ropes.get("rope_freqs.weight", ())
    types = window_pattern(file).get("layer_types", ())
    if "full_attention" not in types:
        raise meta.error("attention.sliding_window_pattern", "a flag for each layer, of which one is false")
    head_dim, first_full = meta.size("attention.key_length"), types.index("full_attention")
    turned = sum(factor < _UNTURNED for factor in factors) / len(factors) if factors else 1.0
    full = {"rope_type": "proportional", "partial_rotary_factor": turned, "rope_theta": meta.number("rope.freq_base")}
    sliding = {"rope_type": "default", "rope_theta": meta.number("rope.freq_base_swa", 10_000.0)}
    mixture = experts(file) if meta.integer("expert_count", 0) else {}
    return {
        "head_dim": meta.size("attention.key_length_swa", head_dim),
        "global_head_dim": head_dim,
        "num_global_key_value_heads": meta.size("attention.head_count_kv_full", meta.size("attention.head_count_kv")),
        "attention_k_eq_v": f"blk.{first_full}.attn_v.weight" not in file.shapes,
        **windowed(file),
        "rope_scaling": None,
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
        "partial_rotary_factor": 1.0,
        "num_kv_shared_layers": meta.integer("attention.shared_kv_layers", 0),
        "use_double_wide_mlp": meta.flag("double_wide"),
        "hidden_size_per_layer_input": meta.integer("embedding_length_per_layer_input", 0),
        "final_logit_softcapping": meta.optional_number("final_logit_softcapping"),
        "enable_moe_block": bool(mixture),
        "top_k_experts": mixture.get("num_experts_per_tok"),
        **mixture,
    }
