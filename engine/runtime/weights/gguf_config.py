"""Rewrites GGUF metadata as the config.json that the model has on the hub.

Facts that a GGUF file does not state (biases, a tied head) are derived from its tensors' names. Facts that llama.cpp
holds in code (the query scale of the Gemma 27B models) are repeated here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from engine.core.errors import ModelLoadError
from engine.runtime.weights.hf_config import HFConfig


class _File(NamedTuple):
    meta: HFConfig  # the architecture's keys, without their prefix
    shapes: Mapping[str, Sequence[int]]
    ropes: Mapping[str, Sequence[float]]  # rope factors, which GGUF stores as tensors


def hf_config(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    ropes: Mapping[str, Sequence[float]],
    source: str,
) -> tuple[str, dict[str, Any]]:
    """Return the architecture and its config, from metadata, shapes and rope factors."""
    arch = check_architecture(metadata, source)
    prefix = f"{arch}."
    own = {key[len(prefix) :]: value for key, value in metadata.items() if key.startswith(prefix)}
    meta = HFConfig(own, f"{source}, {arch}")
    meta.refuse("expert_count", "mixtures of experts are read from safetensors only")
    if "token_embd.weight" not in shapes:
        raise ModelLoadError(f"{source} has no tensor 'token_embd.weight'; it is not a language model.")
    file = _File(meta, shapes, ropes)
    return arch, {"model_type": arch} | _common(file) | ARCHITECTURES[arch](file)


def check_architecture(metadata: Mapping[str, Any], source: str) -> str:
    """Return the architecture of a file. Raises ModelLoadError for one that is not read."""
    arch = HFConfig(metadata, source).text("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelLoadError(
            f"{source}: architecture {arch!r} is not supported in GGUF files; Quire reads {', '.join(ARCHITECTURES)}."
        )
    return arch


def _common(file: _File) -> dict[str, Any]:
    meta = file.meta
    heads, hidden = meta.size("attention.head_count"), meta.size("embedding_length")
    head_dim = meta.size("attention.key_length", hidden // heads)
    return {
        "vocab_size": file.shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": meta.size("feed_forward_length"),
        "num_hidden_layers": meta.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": meta.size("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.number("rope.freq_base", 10_000.0),
        "partial_rotary_factor": meta.integer("rope.dimension_count", head_dim) / head_dim,
        "rope_scaling": _rope_scaling(file),
        "attention_bias": "blk.0.attn_output.bias" in file.shapes,
        "mlp_bias": "blk.0.ffn_down.bias" in file.shapes,
        "tie_word_embeddings": "output.weight" not in file.shapes,
        "dtype": "bfloat16",  # in which dequantised weights are computed
    }


def _rope_scaling(file: _File) -> dict[str, Any] | None:
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


def _window(file: _File) -> int | None:
    return file.meta.optional_integer("attention.sliding_window") or None


def _llama(file: _File) -> dict[str, Any]:
    window = _window(file)
    return {"model_type": "mistral", "sliding_window": window} if window else {}


def _as_named(_: _File) -> dict[str, Any]:
    return {}


def _phi3(file: _File) -> dict[str, Any]:
    return {"sliding_window": _window(file)}


def _query_scalar(file: _File, num_layers_27b: int) -> float:
    """Return the query scale: the mean head width for 27B models, head_dim for others."""
    meta = file.meta
    hidden, heads = meta.size("embedding_length"), meta.size("attention.head_count")
    large = meta.size("block_count") == num_layers_27b
    return hidden / heads if large else float(meta.size("attention.key_length", hidden // heads))


def _gemma2(file: _File) -> dict[str, Any]:
    return {
        "sliding_window": _window(file),
        "query_pre_attn_scalar": _query_scalar(file, 46),
        "attn_logit_softcapping": file.meta.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.meta.number("final_logit_softcapping", 30.0),
    }


def _gemma3(file: _File) -> dict[str, Any]:
    return {
        "model_type": "gemma3_text",
        "sliding_window": _window(file),
        "query_pre_attn_scalar": _query_scalar(file, 62),
        "rope_theta": file.meta.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": file.meta.number("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": file.meta.optional_number("final_logit_softcapping"),
    }


def _granite(file: _File) -> dict[str, Any]:
    return {
        "embedding_multiplier": file.meta.number("embedding_scale"),
        "residual_multiplier": file.meta.number("residual_scale"),
        "attention_multiplier": file.meta.number("attention.scale"),
        "logits_scaling": file.meta.number("logit_scale"),
    }


def _olmo2(file: _File) -> dict[str, Any]:
    window = _window(file)  # OLMo 3 is named olmo2 and has windows
    return {"model_type": "olmo3", "sliding_window": window} if window else {}


# What each architecture has beside the common settings, and its name on the hub if that is another.
ARCHITECTURES: Mapping[str, Callable[[_File], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _as_named,
    "qwen3": _as_named,
    "smollm3": _as_named,
    "phi3": _phi3,
    "gemma": _as_named,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "granite": _granite,
    "olmo2": _olmo2,
}
