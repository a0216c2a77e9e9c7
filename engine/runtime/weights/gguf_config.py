"""Rewrites GGUF metadata as the config.json that the model has on the hub.

Facts that a GGUF file does not state (biases, a tied head) are derived from its tensors' names. Facts that llama.cpp
holds in code (the query scale of the Gemma 27B models) are repeated here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

from engine.core.errors import ModelLoadError
from engine.files.hf_config import HFConfig


class _File(NamedTuple):
    meta: HFConfig  # the architecture's keys, without their prefix
    shapes: Mapping[str, Sequence[int]]
    ropes: Mapping[str, Sequence[float]]  # rope factors, which GGUF stores as tensors


def hf_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], ropes: Mapping[str, Sequence[float]], source: str
) -> tuple[str, dict[str, Any]]:
    """Return the architecture and its config, from metadata, shapes and rope factors."""
    arch = check_architecture(metadata, source)
    prefix = f"{arch}."
    own = {key[len(prefix) :]: value for key, value in metadata.items() if key.startswith(prefix)}
    if arch == "gemma4":
        own = _by_kind_of_layer(own, f"{source}, {arch}")
    if arch == "mamba2":  # which has no heads that attend, and no MLP
        own |= {"attention.head_count": 1, "attention.head_count_kv": 1, "feed_forward_length": 1}
    if arch in _KINDS_OF_LAYERS:
        own = _with_kinds_of_layers(own, *_KINDS_OF_LAYERS[arch])
    meta = HFConfig(_same_in_all_layers(own, f"{source}, {arch}"), f"{source}, {arch}")
    if arch not in _WITH_EXPERTS:
        meta.refuse("expert_count", f"{arch} has no mixture of experts; {', '.join(_WITH_EXPERTS)} have")
    if "token_embd.weight" not in shapes:
        raise ModelLoadError(f"{source} has no tensor 'token_embd.weight'; it is not a language model.")
    file = _File(meta, shapes, ropes)
    return arch, {"model_type": arch} | _common(file) | ARCHITECTURES[arch](file)


def _same_in_all_layers(values: dict[str, Any], source: str) -> dict[str, Any]:
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


def _by_kind_of_layer(values: dict[str, Any], source: str) -> dict[str, Any]:
    """Return Gemma 4's metadata with a number for each kind of layers in place of lists. Raises ModelLoadError."""
    found, windows = dict(values), values.get("attention.sliding_window_pattern")
    heads, widths = values.get("attention.head_count_kv"), values.get("feed_forward_length")
    if isinstance(heads, list) and isinstance(windows, list) and len(heads) == len(windows):
        for key, kind in (("attention.head_count_kv", True), ("attention.head_count_kv_full", False)):
            own = [num for num, has_window in zip(heads, windows, strict=True) if bool(has_window) == kind] or heads
            found[key] = _same_in_all_layers({"attention.head_count_kv": own}, source)["attention.head_count_kv"]
    num_shared = values.get("attention.shared_kv_layers", 0)
    if isinstance(widths, list) and widths and isinstance(num_shared, int):
        wide = [2 * widths[0] if i >= len(widths) - num_shared else widths[0] for i in range(len(widths))]
        if widths == wide:  # else they are all equal, or the model is refused
            found |= {"feed_forward_length": widths[0], "double_wide": bool(num_shared)}
    return found


def _with_kinds_of_layers(values: dict[str, Any], attending: str, recurrent: str) -> dict[str, Any]:
    """Return a hybrid's metadata with the types of layers: those with attention have K/V heads, an MLP alone has a width."""
    heads, given = values.get("attention.head_count_kv"), values.get("feed_forward_length")
    if not isinstance(heads, list):
        return values
    widths = given if isinstance(given, list) else [0] * len(heads)
    alone = "moe" if values.get("expert_count") else "mlp"
    types = [attending if num else alone if width else recurrent for num, width in zip(heads, widths, strict=False)]
    found = {"attention.head_count_kv": [num for num in heads if num] or [1], "layer_types": types}
    return values | found | ({"feed_forward_length": [width for width in widths if width]} if any(widths) else {})


# Of architectures whose K/V heads tell the types of layers: the names of those with attention and of the others.
_KINDS_OF_LAYERS = {
    "granitehybrid": ("attention", "mamba"),
    "nemotron_h": ("attention", "mamba"),
    "nemotron_h_moe": ("attention", "mamba"),
    "lfm2": ("full_attention", "conv"),
    "lfm2moe": ("full_attention", "conv"),
}
_ONE_A_LAYER = ("feed_forward_length", "attention.head_count", "attention.head_count_kv", "expert_used_count")


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
        "intermediate_size": meta.size("feed_forward_length", meta.optional_size("expert_feed_forward_length")),
        "num_hidden_layers": meta.size("block_count") - meta.integer("nextn_predict_layers", 0),
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
        "attention_bias": _has(file, "attn_output.bias"),
        "mlp_bias": _has(file, "ffn_down.bias"),
        "tie_word_embeddings": "output.weight" not in file.shapes,
        **_window_pattern(file),
        "dtype": "bfloat16",  # in which dequantised weights are computed
    }


def _has(file: _File, ending: str) -> bool:
    """Return whether a layer has a tensor."""
    return any(name.endswith(f".{ending}") for name in file.shapes)


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


def _window_pattern(file: _File) -> dict[str, Any]:
    """Return which layers have a window, if the file says so: by a flag for each, or as all but every n-th."""
    pattern = file.meta.values.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        num_layers = file.meta.size("block_count") - file.meta.integer("nextn_predict_layers", 0)
        return {"layer_types": ["sliding_attention" if flag else "full_attention" for flag in pattern[:num_layers]]}
    return {} if pattern is None else {"sliding_window_pattern": file.meta.size("attention.sliding_window_pattern")}


def _window(file: _File) -> int | None:
    return file.meta.optional_integer("attention.sliding_window") or None


def _llama(file: _File) -> dict[str, Any]:
    window = _window(file)
    if file.meta.integer("expert_count", 0):
        return {"model_type": "mixtral", "sliding_window": window} | _experts(file)
    return {"model_type": "mistral", "sliding_window": window} if window else {}


def _mistral3(file: _File) -> dict[str, Any]:
    file.meta.refuse("attention.temperature_scale", "its queries are scaled by their position")
    file.meta.refuse("expert_count", "only the llama architecture has experts among Mistral's")
    return {"model_type": "mistral", "sliding_window": _window(file)}


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


def _gemma3n(file: _File) -> dict[str, Any]:
    meta, deviations = file.meta, file.meta.values.get("activation_sparsity_scale")
    sparsity = {}
    if deviations is not None:  # of a normal distribution, from its mean; -inf where all gates stay
        if not isinstance(deviations, list) or not all(isinstance(each, float) for each in deviations):
            raise meta.error("activation_sparsity_scale", "a list of numbers")
        sparsity = {"activation_sparsity_pattern": [NormalDist().cdf(each) for each in deviations]}
    return {
        "model_type": "gemma3n_text",
        "sliding_window": _window(file),
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


def _gemma4(file: _File) -> dict[str, Any]:
    meta, factors = file.meta, file.ropes.get("rope_freqs.weight", ())
    types = _window_pattern(file).get("layer_types", ())
    if "full_attention" not in types:
        raise meta.error("attention.sliding_window_pattern", "a flag for each layer, of which one is false")
    head_dim, first_full = meta.size("attention.key_length"), types.index("full_attention")
    turned = sum(factor < _UNTURNED for factor in factors) / len(factors) if factors else 1.0
    full = {"rope_type": "proportional", "partial_rotary_factor": turned, "rope_theta": meta.number("rope.freq_base")}
    sliding = {"rope_type": "default", "rope_theta": meta.number("rope.freq_base_swa", 10_000.0)}
    num_experts = meta.integer("expert_count", 0)
    return {
        "model_type": "gemma4_text",
        "head_dim": meta.size("attention.key_length_swa", head_dim),
        "global_head_dim": head_dim,
        "num_global_key_value_heads": meta.size("attention.head_count_kv_full", meta.size("attention.head_count_kv")),
        "attention_k_eq_v": f"blk.{first_full}.attn_v.weight" not in file.shapes,
        "sliding_window": _window(file),
        "rope_scaling": None,
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
        "partial_rotary_factor": 1.0,
        "num_kv_shared_layers": meta.integer("attention.shared_kv_layers", 0),
        "use_double_wide_mlp": meta.flag("double_wide"),
        "hidden_size_per_layer_input": meta.integer("embedding_length_per_layer_input", 0),
        "final_logit_softcapping": meta.optional_number("final_logit_softcapping"),
        "enable_moe_block": bool(num_experts),
        **(
            {
                "num_experts": num_experts,
                "top_k_experts": meta.size("expert_used_count"),
                "moe_intermediate_size": _expert_width(file),
            }
            if num_experts
            else {}
        ),
    }


_UNTURNED = 1e20  # a factor of a rotation that llama.cpp divides a frequency by, so that it does not turn


def _granite(file: _File) -> dict[str, Any]:
    return {
        "model_type": "granite",
        "embedding_multiplier": file.meta.number("embedding_scale"),
        "residual_multiplier": file.meta.number("residual_scale"),
        "attention_multiplier": file.meta.number("attention.scale"),
        "logits_scaling": file.meta.number("logit_scale"),
    }


def _granite_swa(file: _File) -> dict[str, Any]:
    """Granite with windows, of which files have one rope base, and a flag for each layer that has positions."""
    meta, theta = file.meta, file.meta.number("rope.freq_base", 10_000.0)
    flags = meta.values.get("attention.rope_pattern")
    thetas = {"layer_rope_theta": [theta if flag else 0.0 for flag in flags]} if isinstance(flags, list) else {}
    kind: dict[str, Any] = {"model_type": "granite_swa"}
    if meta.integer("expert_count", 0):
        shared = meta.integer("expert_shared_feed_forward_length", 0)
        kind = {"model_type": "granitemoe_swa", **_experts(file), "shared_intermediate_size": shared}
        kind["intermediate_size"] = _expert_width(file)
    return {**_granite(file), "sliding_window": _window(file), **thetas, **kind}


def _olmo2(file: _File) -> dict[str, Any]:
    window = _window(file)  # OLMo 3 is named olmo2 and has windows
    return {"model_type": "olmo3", "sliding_window": window} if window else {}


def _experts(file: _File) -> dict[str, Any]:
    return {"num_experts": file.meta.size("expert_count"), "num_experts_per_tok": file.meta.size("expert_used_count")}


def _width(file: _File, *tensors: str) -> int:
    """Return the rows of an expert: old files have no key for them."""
    endings = tuple(f".{tensor}.weight" for tensor in tensors)
    shape = next((shape for name, shape in file.shapes.items() if name.endswith(endings)), ())
    if len(shape) < 2:
        raise ModelLoadError(f"{file.meta.source}: the file has 'expert_count' but no tensor {tensors[0]!r}.")
    return shape[-2]


def _expert_width(file: _File) -> int:
    if any(name.endswith(".ffn_gate_up_exps.weight") for name in file.shapes):
        return _width(file, "ffn_gate_up_exps") // 2
    return _width(file, "ffn_up_exps", "ffn_up.0")


def _dense_layers(file: _File) -> list[int]:
    names = (name.split(".") for name in file.shapes if name.endswith(".ffn_up.weight"))
    return [int(index) for _, index, *_ in names if index.isdigit()]


def _qwen2moe(file: _File) -> dict[str, Any]:
    return {
        "model_type": "qwen2_moe",
        **_experts(file),
        "moe_intermediate_size": _expert_width(file),
        "shared_expert_intermediate_size": _width(file, "ffn_up_shexp"),
        "norm_topk_prob": False,
        "mlp_only_layers": _dense_layers(file),
        "qkv_bias": "blk.0.attn_q.bias" in file.shapes,
    }


def _qwen3moe(file: _File) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        **_experts(file),
        "moe_intermediate_size": _expert_width(file),
        "norm_topk_prob": True,
        "mlp_only_layers": _dense_layers(file),
    }


def _olmoe(file: _File) -> dict[str, Any]:
    return {**_experts(file), "intermediate_size": _expert_width(file), "norm_topk_prob": False}


def _granitemoe(file: _File) -> dict[str, Any]:
    if not file.meta.integer("expert_count", 0):
        return _granite(file)
    shared_width = file.meta.integer("expert_shared_feed_forward_length", 0)
    shared = {"model_type": "granitemoeshared", "shared_intermediate_size": shared_width} if shared_width else {}
    experts = {"model_type": "granitemoe", **_experts(file), "intermediate_size": _expert_width(file)}
    return {**_granite(file), **experts, **shared}


def _granitehybrid(file: _File) -> dict[str, Any]:
    """Granite 4 with Mamba-2. Files have no bounds of steps; their layers with attention have positions by a flag."""
    if not file.meta.has("attention.scale"):
        return _bamba(file)
    meta, has_experts = file.meta, file.meta.integer("expert_count", 0) > 0
    widths = {"intermediate_size": _expert_width(file), **_experts(file)} if has_experts else {"num_local_experts": 0}
    shared = meta.integer("expert_shared_feed_forward_length", 0) if has_experts else meta.size("feed_forward_length")
    return {
        **_granite(file),
        **_mamba(file, _GRANITE_MAMBA),
        **widths,
        "model_type": "granitemoehybrid",
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


def _mamba(file: _File, names: Sequence[str]) -> dict[str, Any]:
    """Return the sizes of Mamba-2 layers by the names that a family has for them, in the order of these tables."""
    meta, num_heads = file.meta, file.meta.size("ssm.time_step_rank")
    width = meta.size("ssm.inner_size")
    if width % num_heads:
        raise meta.error("ssm.time_step_rank", f"a number that divides ssm.inner_size, {width}")
    sizes = (meta.size(f"ssm.{key}") for key in ("group_count", "state_size", "conv_kernel"))
    biases = (_has(file, f"{tensor}.bias") for tensor in ("ssm_conv1d", "ssm_in"))
    return dict(zip(names, (width, num_heads, width // num_heads, *sizes, *biases), strict=True))


def _bamba(file: _File) -> dict[str, Any]:
    """Bamba, which llama.cpp names as Granite 4 and which has none of its multipliers."""
    attending = [index for index, kind in enumerate(file.meta.texts("layer_types")) if kind == "attention"]
    return {**_mamba(file, _GRANITE_MAMBA), "model_type": "bamba", "attn_layer_indices": attending}


def _falcon_h1(file: _File) -> dict[str, Any]:
    """Falcon-H1, whose multipliers are in the matrices of a file."""
    norm = {"mamba_rms_norm": _has(file, "ssm_norm.weight"), "mamba_norm_before_gate": False}
    return {**_mamba(file, _GRANITE_MAMBA), **norm, "model_type": "falcon_h1", "multipliers_in_matrices": True}


def _mamba2(file: _File) -> dict[str, Any]:
    """Mamba-2 alone. Files have no bounds of steps."""
    return {**_mamba(file, _MAMBA2), "layer_norm_epsilon": file.meta.number("attention.layer_norm_rms_epsilon")}


def _nemotron_h(file: _File) -> dict[str, Any]:
    """Nemotron-H and Nemotron 3. Files have no bounds of steps."""
    meta, types = file.meta, file.meta.texts("layer_types")
    num_layers = meta.size("block_count") - meta.integer("nextn_predict_layers", 0)
    if len(types) < num_layers:
        raise meta.error("block_count", f"{len(types)}, as many as attention.head_count_kv has numbers")
    mixtures = {}
    if meta.integer("expert_count", 0):
        mixtures = {
            **_sigmoid_or_softmax(file),
            "moe_shared_expert_intermediate_size": _width(file, "ffn_up_shexp"),
            "moe_latent_size": meta.optional_size("moe_latent_size"),
        }
    return {
        **_mamba(file, _NEMOTRON_MAMBA),
        "model_type": "nemotron_h",
        "layers_block_type": types[:num_layers],
        "time_step_min": 0.0,
        "layer_norm_epsilon": meta.optional_number("attention.layer_norm_epsilon"),
        **mixtures,
    }


def _gpt_oss(file: _File) -> dict[str, Any]:
    scaling = _rope_scaling(file)
    return {
        "model_type": "gpt_oss",
        **_experts(file),
        "intermediate_size": _expert_width(file),
        "sliding_window": _window(file),
        "rope_scaling": scaling and {**scaling, "truncate": False},
    }


def _sigmoid_or_softmax(file: _File) -> dict[str, Any]:
    """Return the settings of routers that DeepSeek V2, V3 and GLM-4.5 share."""
    meta = file.meta
    groups = meta.size("expert_group_count", 1)
    return {
        **_experts(file),
        "moe_intermediate_size": _expert_width(file),
        "n_shared_experts": meta.integer("expert_shared_count", 0),
        "first_k_dense_replace": meta.integer("leading_dense_block_count", 0),
        "norm_topk_prob": meta.flag("expert_weights_norm"),
        "routed_scaling_factor": meta.number("expert_weights_scale", 1.0) or 1.0,
        "n_group": groups,
        "topk_group": meta.size("expert_group_used_count", 1),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
    }


_SOFTMAX, _SIGMOID = 1, 2


def _glm4moe(file: _File) -> dict[str, Any]:
    if file.meta.integer("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise file.meta.error("expert_gating_func", f"{_SIGMOID}, a sigmoid")
    return {
        "model_type": "glm4_moe",
        **_sigmoid_or_softmax(file),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.shapes,
        "attention_bias": "blk.0.attn_q.bias" in file.shapes,
    }


def _deepseek2(file: _File) -> dict[str, Any]:
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
        **_sigmoid_or_softmax(file),
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


def _qwen35(file: _File) -> dict[str, Any]:
    """Qwen 3.5, whose value heads llama.cpp reorders: the first of each key head, then the second of each."""
    meta, num_heads = file.meta, file.meta.size("ssm.time_step_rank")
    num_layers = meta.size("block_count") - meta.integer("nextn_predict_layers", 0)
    every, flags = meta.size("full_attention_interval", 4), meta.values.get("attention.recurrent_layers")
    if not isinstance(flags, list):
        flags = [(index + 1) % every for index in range(num_layers)]
    return {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention" if flag else "full_attention" for flag in flags[:num_layers]],
        "linear_num_key_heads": meta.size("ssm.group_count"),
        "linear_num_value_heads": num_heads,
        "linear_key_head_dim": meta.size("ssm.state_size"),
        "linear_value_head_dim": meta.size("ssm.inner_size") // num_heads,
        "linear_conv_kernel_dim": meta.size("ssm.conv_kernel"),
        "linear_value_heads_tiled": meta.size("ssm.group_count") != num_heads,
    }


def _qwen35moe(file: _File) -> dict[str, Any]:
    return {
        **_qwen35(file),
        **_experts(file),
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": _expert_width(file),
        "shared_expert_intermediate_size": _width(file, "ffn_up_shexp"),
    }


def _qwen3next(file: _File) -> dict[str, Any]:
    """Qwen3-Next, of which llama.cpp splits the fused rows and leaves the gates, and moves no heads."""
    named = {"model_type": "qwen3_next", "linear_value_heads_tiled": False, "linear_rows_split": True}
    return _qwen35moe(file) | named | {"mlp_only_layers": _dense_layers(file)}


def _lfm2(file: _File) -> dict[str, Any]:
    """LFM2, of which files have the width of the MLP as it is."""
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


def _lfm2moe(file: _File) -> dict[str, Any]:
    if file.meta.integer("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise file.meta.error("expert_gating_func", f"{_SIGMOID}, a sigmoid")
    return {
        **_lfm2(file),
        **_experts(file),
        "model_type": "lfm2_moe",
        "moe_intermediate_size": _expert_width(file),
        "num_dense_layers": file.meta.integer("leading_dense_block_count", 0),
        "use_expert_bias": _has(file, "exp_probs_b.bias"),
    }


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
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "granite": _granite,
    "olmo2": _olmo2,
    "mistral3": _mistral3,
    "qwen2vl": lambda _: {"model_type": "qwen2"},
    "qwen3vl": lambda _: {"model_type": "qwen3"},
    "qwen3vlmoe": _qwen3moe,
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "olmoe": _olmoe,
    "granitemoe": _granitemoe,
    "granite_swa": _granite_swa,
    "granitehybrid": _granitehybrid,
    "falcon-h1": _falcon_h1,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "gpt-oss": _gpt_oss,
    "glm4moe": _glm4moe,
    "deepseek2": _deepseek2,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35moe,
    "qwen3next": _qwen3next,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2moe,
}
_WITH_EXPERTS = (
    "llama", "mistral3", "qwen2moe", "qwen3moe", "qwen3vlmoe", "qwen35moe", "qwen3next", "olmoe", "granitemoe", "granite_swa", "gpt-oss", "glm4moe",
    "deepseek2", "gemma4", "granitehybrid", "nemotron_h_moe", "lfm2moe",
)  # fmt: skip
