"""Rewrites GGUF metadata of hybrids, models with recurrent layers, as gguf_config.py does that of others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from engine.runtime.weights.gguf_config import (
    File,
    dense_layers,
    expert_width,
    experts,
    granite,
    has,
    num_layers,
    require_sigmoid,
    sigmoid_or_softmax,
    width,
)


def without_attention(values: dict[str, Any], _source: str) -> dict[str, Any]:
    """Return the metadata of a model without heads that attend and without MLPs."""
    return values | {"attention.head_count": 1, "attention.head_count_kv": 1, "feed_forward_length": 1}


def _with_kinds_of_layers(values: dict[str, Any], _source: str, *, attending: str, recurrent: str) -> dict[str, Any]:
    """Return a hybrid's metadata with the types of layers: those with attention have K/V heads, an MLP alone has a width."""
    heads, given = values.get("attention.head_count_kv"), values.get("feed_forward_length")
    if not isinstance(heads, list):
        return values
    widths = given if isinstance(given, list) else [0] * len(heads)
    alone = "moe" if values.get("expert_count") else "mlp"
    types = [attending if num else alone if width else recurrent for num, width in zip(heads, widths, strict=False)]
    found = {"attention.head_count_kv": [num for num in heads if num] or [1], "layer_types": types}
    return values | found | ({"feed_forward_length": [width for width in widths if width]} if any(widths) else {})


with_mamba = partial(_with_kinds_of_layers, attending="attention", recurrent="mamba")
with_conv = partial(_with_kinds_of_layers, attending="full_attention", recurrent="conv")


def granitehybrid(file: File) -> dict[str, Any]:
    """Return the settings of Granite 4 with Mamba-2. Files have no bounds of steps; their layers with attention have positions by a flag."""
    if not file.meta.has("attention.scale"):
        return _bamba(file)
    meta, has_experts = file.meta, file.meta.integer("expert_count", 0) > 0
    widths = {"intermediate_size": expert_width(file), **experts(file)} if has_experts else {"num_local_experts": 0}
    shared = meta.integer("expert_shared_feed_forward_length", 0) if has_experts else meta.size("feed_forward_length")
    return {
        **granite(file),
        **_mamba(file, _GRANITE_MAMBA),
        **widths,
        "layer_types": meta.texts("layer_types"),
        "shared_intermediate_size": shared,
        "position_embedding_type": "rope" if meta.flag("rope.scaling.finetuned", True) else "nope",
    }


_GRANITE_MAMBA = tuple(
    f"mamba_{name}"
    for name in ("d_ssm", "n_heads", "d_head", "n_groups", "d_state", "d_conv", "conv_bias", "proj_bias")
)
_MAMBA2 = ("width", "num_heads", "head_dim", "n_groups", "state_size", "conv_kernel", "use_conv_bias", "use_bias")
_NEMOTRON_MAMBA = ("width", "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", *_MAMBA2[5:])


def _mamba(file: File, names: Sequence[str]) -> dict[str, Any]:
    """Return the sizes of Mamba-2 layers by the names that a family has for them, in the order of these tables."""
    meta, num_heads = file.meta, file.meta.size("ssm.time_step_rank")
    width = meta.size("ssm.inner_size")
    meta.require(width % num_heads == 0, "ssm.time_step_rank", f"a number that divides ssm.inner_size, {width}")
    sizes = (meta.size(f"ssm.{key}") for key in ("group_count", "state_size", "conv_kernel"))
    biases = (has(file, f"{tensor}.bias") for tensor in ("ssm_conv1d", "ssm_in"))
    return dict(zip(names, (width, num_heads, width // num_heads, *sizes, *biases), strict=True))


def _bamba(file: File) -> dict[str, Any]:
    """Return the settings of Bamba, which llama.cpp names as Granite 4 and which has none of its multipliers."""
    attending = [index for index, kind in enumerate(file.meta.texts("layer_types")) if kind == "attention"]
    return {**_mamba(file, _GRANITE_MAMBA), "model_type": "bamba", "attn_layer_indices": attending}


def falcon_h1(file: File) -> dict[str, Any]:
    """Return the settings of Falcon-H1, whose multipliers are in the matrices of a file."""
    norm = {"mamba_rms_norm": has(file, "ssm_norm.weight"), "mamba_norm_before_gate": False}
    return {**_mamba(file, _GRANITE_MAMBA), **norm, "multipliers_in_matrices": True}


def mamba2(file: File) -> dict[str, Any]:
    """Return the settings of Mamba-2 alone. Files have no bounds of steps."""
    return {**_mamba(file, _MAMBA2), "layer_norm_epsilon": file.meta.number("attention.layer_norm_rms_epsilon")}


def nemotron_h(file: File) -> dict[str, Any]:
    """Return the settings of Nemotron-H and Nemotron 3. Files have no bounds of steps."""
    meta, types = file.meta, file.meta.texts("layer_types")
    if len(types) < num_layers(file):
        raise meta.error("block_count", f"{len(types)}, as many as attention.head_count_kv has numbers")
    mixtures = {}
    if meta.integer("expert_count", 0):
        mixtures = {
            **sigmoid_or_softmax(file),
            "moe_shared_expert_intermediate_size": width(file, "ffn_up_shexp"),
            "moe_latent_size": meta.optional_size("moe_latent_size"),
        }
    return {
        **_mamba(file, _NEMOTRON_MAMBA),
        "layers_block_type": types[: num_layers(file)],
        "time_step_min": 0.0,
        "layer_norm_epsilon": meta.optional_number("attention.layer_norm_epsilon"),
        **mixtures,
    }


def qwen35(file: File) -> dict[str, Any]:
    """Return the settings of Qwen 3.5, whose value heads llama.cpp reorders: the first of each key head, then the second of each."""
    meta, num_heads = file.meta, file.meta.size("ssm.time_step_rank")
    every, flags = meta.size("full_attention_interval", 4), meta.values.get("attention.recurrent_layers")
    if not isinstance(flags, list):
        flags = [(index + 1) % every for index in range(num_layers(file))]
    return {
        "layer_types": ["linear_attention" if flag else "full_attention" for flag in flags[: num_layers(file)]],
        "linear_num_key_heads": meta.size("ssm.group_count"),
        "linear_num_value_heads": num_heads,
        "linear_key_head_dim": meta.size("ssm.state_size"),
        "linear_value_head_dim": meta.size("ssm.inner_size") // num_heads,
        "linear_conv_kernel_dim": meta.size("ssm.conv_kernel"),
        "linear_value_heads_tiled": meta.size("ssm.group_count") != num_heads,
    }


def qwen35moe(file: File) -> dict[str, Any]:
    return {
        **qwen35(file),
        **experts(file),
        "shared_expert_intermediate_size": width(file, "ffn_up_shexp"),
    }


def qwen3next(file: File) -> dict[str, Any]:
    """Return the settings of Qwen3-Next, of which llama.cpp splits the fused rows and leaves the gates, and moves no heads."""
    named = {"linear_value_heads_tiled": False, "linear_rows_split": True}
    return qwen35moe(file) | named | {"mlp_only_layers": dense_layers(file)}


def lfm2(file: File) -> dict[str, Any]:
    """Return the settings of LFM2, of which files have the width of the MLP as it is."""
    meta = file.meta
    meta.refuse("attention.sliding_window", "its layers with attention see all positions")
    if not meta.flag("attention.causal", True):
        raise meta.error("attention.causal", "true: its embedding models see the tokens behind, too")
    return {
        "layer_types": meta.texts("layer_types"),
        "conv_L_cache": meta.size("shortconv.l_cache"),
        "norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,
    }


def lfm2moe(file: File) -> dict[str, Any]:
    require_sigmoid(file)
    return {
        **lfm2(file),
        **experts(file),
        "num_dense_layers": file.meta.integer("leading_dense_block_count", 0),
        "use_expert_bias": has(file, "exp_probs_b.bias"),
    }
