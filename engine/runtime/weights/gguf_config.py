"""Rewrites GGUF metadata as the config.json that the model has on the hub.

Facts that a GGUF file does not state (biases, a tied head) are derived from its tensors' names. Facts that llama.cpp
holds in code (the query scale of the Gemma 27B models) are repeated. What hybrids, Gemma or encoders alone need is in files
beside this one, which are imported for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, NamedTuple

from engine.core.errors import ModelLoadError
from engine.files.hf_config import HFConfig


class File(NamedTuple):
    """What is read of a file."""

    meta: HFConfig  # the architecture's keys, without their prefix
    shapes: Mapping[str, Sequence[int]]
    ropes: Mapping[str, Sequence[float]]  # rope factors, which GGUF stores as tensors


def hf_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], ropes: Mapping[str, Sequence[float]], source: str
) -> tuple[str, dict[str, Any]]:
    """Return the architecture and its config, from metadata, shapes and rope factors."""
    arch = check_architecture(metadata, source)
    row, prefix, named = ARCHITECTURES[arch], f"{arch}.", f"{source}, {arch}"
    own = {key[len(prefix) :]: value for key, value in metadata.items() if key.startswith(prefix)}
    meta = HFConfig(same_in_all_layers(_found(row.by_layer)(own, named), named), named)
    if not row.has_experts:
        having = (name for name, each in ARCHITECTURES.items() if each.has_experts)
        meta.refuse("expert_count", f"{arch} has no mixture of experts; {', '.join(having)} have")
    if "token_embd.weight" not in shapes:
        raise ModelLoadError(f"{source} has no tensor 'token_embd.weight'; it is not a language model.")
    file = File(meta, shapes, ropes)
    values = {"model_type": row.name or arch} | _common(file) | _found(row.settings)(file)
    if not any(name.startswith(("cls.", "dense_")) for name in shapes):
        return arch, values
    return arch, values | _found(f"{_ENCODERS}behind_pooling")(file)


def _found(function: Callable[..., dict[str, Any]] | str) -> Callable[..., dict[str, Any]]:
    return resolve_name(function) if isinstance(function, str) else function


def same_in_all_layers(values: dict[str, Any], source: str) -> dict[str, Any]:
    """Return metadata with one number for each list with a number a layer. Raises ModelLoadError if they differ."""
    found = dict(values)
    for key in _ONE_A_LAYER:
        value = values.get(key)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelLoadError(
                    f"{source}: {key!r} differs between layers ({str(value)[1:60]}...), which Quire cannot serve; serve a model "
                    "whose layers are of one size, such as Qwen3."
                )
            found[key] = value[0]
    return found


_ONE_A_LAYER = ("feed_forward_length", "attention.head_count", "attention.head_count_kv", "expert_used_count")


def check_architecture(metadata: Mapping[str, Any], source: str) -> str:
    """Return the architecture of a file. Raises ModelLoadError for one that is not read."""
    arch = HFConfig(metadata, source).text("general.architecture")
    if arch == "clip":
        raise ModelLoadError(
            f"{source} is the vision half of a model; name the file of its text, and this one with --mmproj."
        )
    if arch not in ARCHITECTURES:
        raise ModelLoadError(
            f"{source}: architecture {arch!r} is not supported in GGUF files; Quire reads {', '.join(ARCHITECTURES)}."
        )
    return arch


def _common(file: File) -> dict[str, Any]:
    meta = file.meta
    heads, hidden = meta.size("attention.head_count"), meta.size("embedding_length")
    head_dim = meta.size("attention.key_length", hidden // heads)
    return {
        "vocab_size": file.shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": meta.size("feed_forward_length", meta.optional_size("expert_feed_forward_length")),
        "num_hidden_layers": num_layers(file),
        "num_nextn_predict_layers": meta.integer("nextn_predict_layers", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": meta.size("context_length"),
        "rms_norm_eps": meta.number(
            "attention.layer_norm_rms_epsilon", meta.optional_number("attention.layer_norm_epsilon")
        ),
        "rope_theta": meta.number("rope.freq_base", 10_000.0),
        "partial_rotary_factor": meta.integer("rope.dimension_count", head_dim) / head_dim,
        "rope_scaling": _rope_scaling(file),
        "attention_bias": has(file, "attn_output.bias"),
        "mlp_bias": has(file, "ffn_down.bias"),
        "tie_word_embeddings": "output.weight" not in file.shapes,
        "pooling_type": meta.integer("pooling_type", 0),
        **window_pattern(file),
        "dtype": "bfloat16",  # in which dequantised weights are computed
    }


def num_layers(file: File) -> int:
    """Return the number of layers, without those that draft."""
    return file.meta.size("block_count") - file.meta.integer("nextn_predict_layers", 0)


def has(file: File, ending: str) -> bool:
    """Return whether a layer has a tensor."""
    return any(name.endswith(f".{ending}") for name in file.shapes)


def _rope_scaling(file: File) -> dict[str, Any] | None:
    meta, trained = file.meta, file.meta.optional_integer("rope.scaling.original_context_length")
    kind = meta.text("rope.scaling.type", "none")
    if "rope_freqs.weight" in file.ropes:  # Llama 3's scaling, precomputed as one factor for each dimension
        factors = list(file.ropes["rope_freqs.weight"])
        return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    if "rope_factors_long.weight" in file.ropes:
        return {
            "rope_type": "longrope",
            "short_factor": list(file.ropes.get("rope_factors_short.weight", ())),
            "long_factor": list(file.ropes["rope_factors_long.weight"]),
            "attention_factor": meta.number("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": trained,
        }
    if kind == "none":
        return None
    factor = meta.positive("rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": trained,
            "beta_fast": meta.optional_number("rope.scaling.yarn_beta_fast"),
            "beta_slow": meta.optional_number("rope.scaling.yarn_beta_slow"),
            "attention_factor": meta.number("rope.scaling.attn_factor", 1.0) * (1 + 0.1 * math.log(factor)),
        }
    raise meta.error("rope.scaling.type", "none, linear, yarn or longrope with its factor tensors")


def window_pattern(file: File) -> dict[str, Any]:
    """Return which layers have a window, if the file says so: by a flag for each, or as all but every n-th."""
    pattern = file.meta.values.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        return {
            "layer_types": ["sliding_attention" if flag else "full_attention" for flag in pattern[: num_layers(file)]]
        }
    return {} if pattern is None else {"sliding_window_pattern": file.meta.size("attention.sliding_window_pattern")}


def windowed(file: File) -> dict[str, int | None]:
    """Return the window, if the file has one."""
    return {"sliding_window": file.meta.optional_integer("attention.sliding_window") or None}


def _llama(file: File) -> dict[str, Any]:
    window = windowed(file)
    if file.meta.integer("expert_count", 0):
        return {"model_type": "mixtral", **window, **experts(file)}
    return {"model_type": "mistral", **window} if window["sliding_window"] else {}


def _mistral3(file: File) -> dict[str, Any]:
    file.meta.refuse("attention.temperature_scale", "its queries are scaled by their position")
    file.meta.refuse("expert_count", "only the llama architecture has experts among Mistral's")
    return windowed(file)


def granite(file: File) -> dict[str, Any]:
    """Return Granite's multipliers."""
    return {
        "embedding_multiplier": file.meta.number("embedding_scale"),
        "residual_multiplier": file.meta.number("residual_scale"),
        "attention_multiplier": file.meta.number("attention.scale"),
        "logits_scaling": file.meta.number("logit_scale"),
    }


def _granite_swa(file: File) -> dict[str, Any]:
    """Granite with windows, of which files have one rope base, and a flag for each layer that has positions."""
    meta, theta = file.meta, file.meta.number("rope.freq_base", 10_000.0)
    flags = meta.values.get("attention.rope_pattern")
    thetas = {"layer_rope_theta": [theta if flag else 0.0 for flag in flags]} if isinstance(flags, list) else {}
    kind: dict[str, Any] = {}
    if meta.integer("expert_count", 0):
        shared = meta.integer("expert_shared_feed_forward_length", 0)
        kind = {"model_type": "granitemoe_swa", **experts(file), "shared_intermediate_size": shared}
        kind["intermediate_size"] = expert_width(file)
    return {**granite(file), **windowed(file), **thetas, **kind}


def _olmo2(file: File) -> dict[str, Any]:
    window = windowed(file)  # OLMo 3 is named olmo2 and has windows
    return {"model_type": "olmo3", **window} if window["sliding_window"] else {}


def experts(file: File) -> dict[str, int]:
    """Return the settings that all mixtures have."""
    return {
        "num_experts": file.meta.size("expert_count"),
        "num_experts_per_tok": file.meta.size("expert_used_count"),
        "moe_intermediate_size": expert_width(file),
    }


def width(file: File, *tensors: str) -> int:
    """Return the rows of an expert: old files have no key for them."""
    endings = tuple(f".{tensor}.weight" for tensor in tensors)
    shape = next((shape for name, shape in file.shapes.items() if name.endswith(endings)), ())
    if len(shape) < 2:
        raise ModelLoadError(f"{file.meta.source}: the file has 'expert_count' but no tensor {tensors[0]!r}.")
    return shape[-2]


def expert_width(file: File) -> int:
    """Return the rows of an expert of a mixture."""
    if any(name.endswith(".ffn_gate_up_exps.weight") for name in file.shapes):
        return width(file, "ffn_gate_up_exps") // 2
    return width(file, "ffn_up_exps", "ffn_up.0")


def dense_layers(file: File) -> list[int]:
    """Return the layers without experts."""
    names = (name.split(".") for name in file.shapes if name.endswith(".ffn_up.weight"))
    return [int(index) for _, index, *_ in names if index.isdigit()]


def _qwen2moe(file: File) -> dict[str, Any]:
    return {
        **experts(file),
        "shared_expert_intermediate_size": width(file, "ffn_up_shexp"),
        "norm_topk_prob": False,
        "mlp_only_layers": dense_layers(file),
        "qkv_bias": "blk.0.attn_q.bias" in file.shapes,
    }


def _qwen3moe(file: File) -> dict[str, Any]:
    return {
        **experts(file),
        "norm_topk_prob": True,
        "mlp_only_layers": dense_layers(file),
    }


def _olmoe(file: File) -> dict[str, Any]:
    return {**experts(file), "intermediate_size": expert_width(file), "norm_topk_prob": False}


def _granitemoe(file: File) -> dict[str, Any]:
    if not file.meta.integer("expert_count", 0):
        return granite(file)
    shared_width = file.meta.integer("expert_shared_feed_forward_length", 0)
    shared = {"model_type": "granitemoeshared", "shared_intermediate_size": shared_width} if shared_width else {}
    mixture = {"model_type": "granitemoe", **experts(file), "intermediate_size": expert_width(file)}
    return {**granite(file), **mixture, **shared}


def _gpt_oss(file: File) -> dict[str, Any]:
    scaling = _rope_scaling(file)
    return {
        **experts(file),
        "intermediate_size": expert_width(file),
        **windowed(file),
        "rope_scaling": scaling and {**scaling, "truncate": False},
    }


def sigmoid_or_softmax(file: File) -> dict[str, Any]:
    """Return the settings of routers that DeepSeek V2, V3 and GLM-4.5 share."""
    meta = file.meta
    groups = meta.size("expert_group_count", 1)
    return {
        **experts(file),
        "n_shared_experts": meta.integer("expert_shared_count", 0),
        "first_k_dense_replace": meta.integer("leading_dense_block_count", 0),
        "norm_topk_prob": meta.flag("expert_weights_norm"),
        "routed_scaling_factor": meta.number("expert_weights_scale", 1.0) or 1.0,
        "n_group": groups,
        "topk_group": meta.size("expert_group_used_count", 1),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
    }


_SOFTMAX, _SIGMOID = 1, 2


def require_sigmoid(file: File) -> None:
    """Raise ModelLoadError for a router with another function."""
    if file.meta.integer("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise file.meta.error("expert_gating_func", f"{_SIGMOID}, a sigmoid")


def _glm4moe(file: File) -> dict[str, Any]:
    require_sigmoid(file)
    return {
        **sigmoid_or_softmax(file),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.shapes,
        "attention_bias": "blk.0.attn_q.bias" in file.shapes,
    }


def _deepseek2(file: File) -> dict[str, Any]:
    """DeepSeek V2 and V3. Files of before 2025 have kv_b whole, and other keys for the widths of a head."""
    meta = file.meta
    has_correction = any(name.endswith(".exp_probs_b.bias") for name in file.shapes)  # beside a sigmoid only
    gating = meta.integer("expert_gating_func", 0) or (_SIGMOID if has_correction else _SOFTMAX)
    if gating not in (_SOFTMAX, _SIGMOID):
        raise meta.error("expert_gating_func", f"{_SOFTMAX} or {_SIGMOID}, a softmax or a sigmoid")
    is_split = "blk.0.attn_k_b.weight" in file.shapes
    heads, rotated = meta.size("attention.head_count"), meta.size("rope.dimension_count")
    head_dim = meta.size("attention.key_length_mla", meta.size("attention.key_length"))
    scaling, mscale = _rope_scaling(file), 10 * meta.number("rope.scaling.yarn_log_multiplier", 0.0)
    if scaling is not None:
        scaling = {key: value for key, value in scaling.items() if key != "attention_factor"}
        scaling |= {"mscale": mscale, "mscale_all_dim": mscale} if mscale else {}
    return {
        "model_type": "deepseek_v3" if gating == _SIGMOID else "deepseek_v2",
        **sigmoid_or_softmax(file),
        "num_key_value_heads": heads,
        "head_dim": rotated,
        "partial_rotary_factor": 1.0,
        "kv_lora_rank": meta.size("attention.kv_lora_rank"),
        "q_lora_rank": meta.optional_size("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": head_dim - rotated,
        "v_head_dim": meta.size("attention.value_length_mla", meta.size("attention.value_length")),
        "kv_b_split": is_split,
        "rope_interleave": True,
        "rope_scaling": scaling,
    }


class Architecture(NamedTuple):
    """What one architecture has beside the common settings; functions of other files are named by their places."""

    name: str = ""  # on the hub, if that is another
    settings: Callable[[File], dict[str, Any]] | str = lambda _: {}
    has_experts: bool = False
    # Replaces lists with a value a layer by what a config.json has; the others must be of one value.
    by_layer: Callable[[dict[str, Any], str], dict[str, Any]] | str = lambda values, _: values


_GEMMA = "engine.runtime.weights.gguf_gemma:"
_HYBRIDS = "engine.runtime.weights.gguf_hybrids:"
_ENCODERS = "engine.runtime.weights.gguf_encoders:"
_WITH_MAMBA, _WITH_CONV = f"{_HYBRIDS}with_mamba", f"{_HYBRIDS}with_conv"
ARCHITECTURES = {
    "llama": Architecture("", _llama, has_experts=True),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
    "smollm3": Architecture(),
    "phi3": Architecture("", windowed),
    "gemma": Architecture(),
    "gemma2": Architecture("", f"{_GEMMA}gemma2"),
    "gemma3": Architecture("gemma3_text", f"{_GEMMA}gemma3"),
    "gemma-embedding": Architecture("gemma3_text", f"{_ENCODERS}gemma_embedding"),
    "gemma3n": Architecture("gemma3n_text", f"{_GEMMA}gemma3n"),
    "gemma4": Architecture("gemma4_text", f"{_GEMMA}gemma4", has_experts=True, by_layer=f"{_GEMMA}by_kind_of_layer"),
    "granite": Architecture("", granite),
    "olmo2": Architecture("", _olmo2),
    "mistral3": Architecture("mistral", _mistral3, has_experts=True),  # to be refused with a reason
    "qwen2vl": Architecture("qwen2"),
    "qwen3vl": Architecture("qwen3"),
    "qwen3vlmoe": Architecture("qwen3_moe", _qwen3moe, has_experts=True),
    "qwen2moe": Architecture("qwen2_moe", _qwen2moe, has_experts=True),
    "qwen3moe": Architecture("qwen3_moe", _qwen3moe, has_experts=True),
    "olmoe": Architecture("", _olmoe, has_experts=True),
    "granitemoe": Architecture("granite", _granitemoe, has_experts=True),
    "granite_swa": Architecture("", _granite_swa, has_experts=True),
    "granitehybrid": Architecture("granitemoehybrid", f"{_HYBRIDS}granitehybrid", True, _WITH_MAMBA),
    "falcon-h1": Architecture("falcon_h1", f"{_HYBRIDS}falcon_h1"),
    "mamba2": Architecture("", f"{_HYBRIDS}mamba2", by_layer=f"{_HYBRIDS}without_attention"),
    "nemotron_h": Architecture("", f"{_HYBRIDS}nemotron_h", by_layer=_WITH_MAMBA),
    "nemotron_h_moe": Architecture("nemotron_h", f"{_HYBRIDS}nemotron_h", True, _WITH_MAMBA),
    "gpt-oss": Architecture("gpt_oss", _gpt_oss, has_experts=True),
    "glm4moe": Architecture("glm4_moe", _glm4moe, has_experts=True),
    "deepseek2": Architecture("", _deepseek2, has_experts=True),
    "qwen35": Architecture("qwen3_5_text", f"{_HYBRIDS}qwen35"),
    "qwen35moe": Architecture("qwen3_5_moe_text", f"{_HYBRIDS}qwen35moe", has_experts=True),
    "qwen3next": Architecture("qwen3_next", f"{_HYBRIDS}qwen3next", has_experts=True),
    "bert": Architecture("", f"{_ENCODERS}bert"),
    "nomic-bert": Architecture("nomic_bert", f"{_ENCODERS}nomic_bert"),
    "modern-bert": Architecture("modernbert", f"{_ENCODERS}modern_bert"),
    "lfm2": Architecture("", f"{_HYBRIDS}lfm2", by_layer=_WITH_CONV),
    "lfm2moe": Architecture("lfm2_moe", f"{_HYBRIDS}lfm2moe", True, _WITH_CONV),
}
