"""GGUF: every quantisation against gguf's own arithmetic, every architecture against its safetensors twin, bad files."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import engine.runtime.native.library as library_module
import engine.runtime.weights.gguf as gguf_module
from engine.core.errors import ModelLoadError
from engine.files.gguf_kinds import Kind
from engine.runtime.models.families import read_config
from engine.runtime.weights.gguf import GGUFCheckpoint
from engine.runtime.weights.gguf_config import hf_config
from engine.sources.model_source import find_model
from tests.cpu.gguf_rows import floats_of, quantised, written
from tests.cpu.test_models_families import CASES, QWEN3_5, Case, load, logits_of, rope, save_tiny

KINDS = [
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
    "Q1_0", "Q2_0",
]  # fmt: skip
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "shared_mlp.output_linear": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{
        f"mlp.{shared}.{role}_proj": f"ffn_{role}_shexp"
        for shared in ("shared_expert", "shared_experts")
        for role in ("gate", "up", "down")
    },
}
DELTA = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
LFM2_NAMES = {
    "model.embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
}
MAMBA_NAMES = {"in_proj": "ssm_in", "conv1d": "ssm_conv1d", "out_proj": "ssm_out"}
OF_MAMBA = ("mamba.", *(f"mixer.{each}" for each in (*MAMBA_NAMES, "A_log", "D", "dt_bias", "norm.")))
NEMOTRON_NAMES = {
    "model.embeddings": "token_embd",
    "model.norm_f": "output_norm",
    "norm": "attn_norm",
    "mixer.gate": "ffn_gate_inp",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
    **{f"mixer.{role}_proj": f"attn_{role if role != 'o' else 'output'}" for role in "qkvo"},
}
FALCON_H1_NAMES = {
    "model.final_layernorm": "output_norm",
    "pre_ff_layernorm": "ffn_norm",
    **{f"feed_forward.{role}_proj": f"ffn_{role}" for role in ("gate", "up", "down")},
}
AFTER = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
SANDWICH = AFTER | {"pre_feedforward_layernorm": "ffn_norm"}

OFFSET = (
    "gemma",
    "gemma2",
    "gemma3",
    "gemma-embedding",
    "qwen35",
    "qwen35moe",
    "qwen3next",
)  # whose norms are stored as 1 + weight
INTERLEAVED = ("llama", "mistral3", "granite", "granitemoe", "granitehybrid", "granite_swa", "smollm3")
EXPERTS = {"expert_count": 8, "expert_used_count": 3}
GRANITE = {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.1}
BEFORE_MLP = {"post_attention_layernorm": "post_attention_norm"}
GLM4 = {
    **EXPERTS,
    "leading_dense_block_count": 1,
    "rope.dimension_count": 8,
    "expert_gating_func": 2,
}


QWEN35 = {
    "rope.dimension_count": 8,
    "attention.recurrent_layers": [True, False, True],
    "ssm.conv_kernel": 4,
    "ssm.inner_size": QWEN3_5["linear_num_value_heads"] * QWEN3_5["linear_value_head_dim"],
    "ssm.state_size": QWEN3_5["linear_key_head_dim"],
    "ssm.time_step_rank": QWEN3_5["linear_num_value_heads"],
    "ssm.group_count": QWEN3_5["linear_num_key_heads"],
}


def lfm2(name: str, **extra: Any) -> tuple[Case, dict[str, str], dict[str, Any]]:
    """LFM2's metadata; the width of the MLP as it is, and no scale of experts."""
    case = Case(CASES[name].config, CASES[name].settings | {"routed_scaling_factor": 1.0})
    heads = [2 if kind == "full_attention" else 0 for kind in case.settings["layer_types"]]
    return case, LFM2_NAMES, {"attention.head_count_kv": heads, "shortconv.l_cache": 3} | extra


def granite_hybrid(name: str, **extra: Any) -> tuple[Case, dict[str, str], dict[str, Any]]:
    """Granite's metadata with Mamba-2 layers; files have no bounds of steps."""
    case = Case(CASES[name].config, CASES[name].settings | {"time_step_limit": (0.0, float("inf"))})
    config = case.build()
    names, kinds = {}, config.layer_types
    if config.num_local_experts:
        extra |= {**EXPERTS, "expert_shared_feed_forward_length": config.shared_intermediate_size}
    else:
        names = {"shared_mlp.output_linear": "ffn_down"}
        extra |= {"feed_forward_length": config.shared_intermediate_size}
    return case, names, {
        **GRANITE,
        "logit_scale": 6.0,
        "attention.head_count_kv": [2 if kind == "full_attention" else 0 for kind in kinds],
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.inner_size": 2 * config.hidden_size,
        "ssm.state_size": config.mamba_d_state,
        "ssm.time_step_rank": config.mamba_n_heads,
        "ssm.group_count": config.mamba_n_groups,
        "rope.scaling.finetuned": config.position_embedding_type == "rope",
        **extra,
    }  # fmt: skip


def falcon_h1(name: str) -> tuple[Case, dict[str, str], dict[str, Any]]:
    """Falcon-H1's metadata; files have no bounds of steps."""
    case = Case(
        CASES[name].config,
        CASES[name].settings | {"time_step_limit": (0.0, float("inf")), "tie_word_embeddings": False},
    )
    config = case.build()
    return case, FALCON_H1_NAMES, {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.inner_size": config.mamba_d_head * config.mamba_n_heads,
        "ssm.state_size": config.mamba_d_state,
        "ssm.time_step_rank": config.mamba_n_heads,
        "ssm.group_count": config.mamba_n_groups,
    }  # fmt: skip


def multiplied(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    """Falcon-H1's matrices, into which the converter multiplies what the model multiplies their results by."""
    into, groups = config.attention_in_multiplier, config.mamba_n_groups * config.mamba_d_state
    width = config.mamba_d_head * config.mamba_n_heads
    rows = np.repeat(config.ssm_multipliers, (width, width, groups, groups, config.mamba_n_heads))[:, None]
    factors = {
        "embed_tokens.weight": config.embedding_multiplier,
        "lm_head.weight": config.lm_head_multiplier,
        "q_proj.weight": into,
        "k_proj.weight": into * config.key_multiplier,
        "v_proj.weight": into,
        "o_proj.weight": config.attention_out_multiplier,
        "in_proj.weight": rows * config.ssm_in_multiplier,
        "out_proj.weight": config.ssm_out_multiplier,
        "gate_proj.weight": config.mlp_multipliers[0],
        "down_proj.weight": config.mlp_multipliers[1],
    }
    return np.float32(values * factors.get(".".join(name.split(".")[-2:]), 1.0))


def bamba() -> tuple[Case, dict[str, str], dict[str, Any]]:
    """Bamba's metadata, which is Granite's without multipliers."""
    case = Case(CASES["bamba"].config, CASES["bamba"].settings | {"time_step_limit": (0.0, float("inf"))})
    extra = {key: value for key, value in granite_hybrid("granitemoehybrid-mamba-dense")[2].items() if "ssm" in key}
    sizes = {"ssm.conv_kernel": 4, "ssm.state_size": 8, "attention.head_count_kv": [0, 2, 0]}
    return case, FALCON_H1_NAMES, extra | sizes | {"rope.dimension_count": 8, "rope.scaling.finetuned": True}


def granite_swa(name: str, **extra: Any) -> tuple[Case, dict[str, str], dict[str, Any]]:
    """Granite's metadata with windows: one rope base, and the layers that have it."""
    case = Case(CASES[name].config, CASES[name].settings | {"layer_rope_theta": [10_000.0, 0, 10_000.0]})
    return case, {}, {
        **GRANITE,
        "logit_scale": 6.0,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [False, True, True],
        "attention.rope_pattern": [True, False, True],
        **extra,
    }  # fmt: skip


def nemotron(name: str, **settings: Any) -> tuple[Case, dict[str, str], dict[str, Any]]:
    """Nemotron's metadata; files have no bounds of steps, and one kind of feed-forward."""
    case = Case(CASES[name].config, CASES[name].settings | {"time_step_min": 1e-9} | settings)
    config = case.build()
    has_experts = "moe" in config.layers_block_type
    width = config.moe_intermediate_size if has_experts else config.intermediate_size
    extra: dict[str, Any] = {
        "attention.head_count_kv": [2 if kind == "full_attention" else 0 for kind in config.layers_block_type],
        "feed_forward_length": [width if kind in ("mlp", "moe") else 0 for kind in config.layers_block_type],
        "attention.layer_norm_epsilon": 1e-5,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.state_size": config.ssm_state_size,
        "ssm.time_step_rank": config.mamba_num_heads,
        "ssm.group_count": config.n_groups,
    }
    if has_experts:
        extra |= {
            **EXPERTS,
            "expert_shared_count": 1,
            "expert_weights_norm": config.norm_topk_prob,
            "expert_weights_scale": float(config.routed_scaling_factor),
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
        }
    if config.moe_latent_size:
        extra["moe_latent_size"] = config.moe_latent_size
    return case, NEMOTRON_NAMES, extra


GEMMA4_NAMES = SANDWICH | {
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
}
WHOLE_IN_LAYER = {
    "pre_ff_layernorm.weight": "ffn_norm",
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}


def gemma4(name: str, **extra: Any) -> tuple[Case, dict[str, str], dict[str, Any]]:
    """Gemma 4's metadata: lengths of heads of either kind, and layers that share."""
    settings = CASES[name].settings
    kinds = [kind == "sliding_attention" for kind in settings["layer_types"]]
    found = {
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": kinds,
        "attention.key_length": 32,
        "attention.key_length_swa": 16,
        "rope.freq_base": 1_000_000.0,
        "rope.freq_base_swa": 10_000.0,
        "attention.shared_kv_layers": settings.get("num_kv_shared_layers", 0),
        "embedding_length_per_layer_input": settings["hidden_size_per_layer_input"],
    }
    return CASES[name], GEMMA4_NAMES, found | extra


GEMMA3N_NAMES = GEMMA4_NAMES | {
    "altup.correction_coefs": "altup_correct_coef",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
}
GEMMA3N = {
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": [True, False] * 2,
    "attention.shared_kv_layers": 2,
    "rope.freq_base": 1_000_000.0,
    "embedding_length_per_layer_input": 8,
    "altup.num_inputs": 4,
    "activation_sparsity_scale": [0.0, *[float("-inf")] * 3],
    "feed_forward_length": 96,
}


def deepseek(name: str, *, is_split: bool, **settings: Any) -> tuple[Case, dict[str, str], dict[str, Any]]:
    """DeepSeek's metadata; files since 2025 have kv_b in two, and other keys for the widths of a head."""
    case = Case(CASES[name].config, CASES[name].settings | settings)
    config = case.build()
    head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    extra = {
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "leading_dense_block_count": getattr(config, "first_k_dense_replace", 1),
        "rope.dimension_count": config.qk_rope_head_dim,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": head_dim,
        "attention.value_length": config.v_head_dim,
    }
    if is_split:
        extra |= {
            "attention.head_count_kv": 1,
            "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
            "attention.value_length": config.kv_lora_rank,
            "attention.key_length_mla": head_dim,
            "attention.value_length_mla": config.v_head_dim,
        }
    if config.q_lora_rank:
        extra["attention.q_lora_rank"] = config.q_lora_rank
    if config.model_type != "deepseek_v2":
        extra |= {"expert_gating_func": 2, "expert_weights_norm": True}
    if config.n_group and config.n_group > 1:
        extra |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    scaling = config.rope_parameters
    if scaling["rope_type"] == "yarn":
        extra |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": scaling["factor"],
            "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": 0.1 * scaling["mscale_all_dim"],
        }
    return case, {} if is_split else {"whole": "attn_kv_b"}, extra


YARN_AS_IT_IS = rope(
    "yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0, truncate=False
)
DEEPSEEK_YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.75, mscale_all_dim=0.75)

PLAIN_ROPE = {"rope_type": "default", "rope_theta": 500_000.0}
OLMO3_ROPES = {  # only full layers are scaled
    "sliding_attention": PLAIN_ROPE,
    "full_attention": PLAIN_ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
}

# architecture, and perhaps what is special: the model, names that differ, metadata beyond the common
ARCHITECTURES: dict[str, tuple[Case, dict[str, str], dict[str, Any]]] = {
    "llama": (CASES["llama-tied-biased"], {}, {}),
    "qwen2": (CASES["qwen2"], {}, {}),
    "qwen3": (CASES["qwen3"], {}, {}),
    "smollm3": (Case("SmolLM3Config", {"num_hidden_layers": 5, "rope_theta": 10000.0}), {}, {}),
    "phi3": (CASES["phi3"], {}, {"attention.sliding_window": 8}),
    "gemma": (CASES["gemma"], {}, {}),
    "gemma2": (
        Case("Gemma2Config", {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32}),
        SANDWICH,
        {"attention.sliding_window": 8, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": (
        Case(
            "Gemma3TextConfig",
            {"num_hidden_layers": 7, "head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32},
        ),
        SANDWICH,
        {"attention.sliding_window": 8, "rope.freq_base": 1_000_000.0},
    ),
    "gemma3n": (CASES["gemma3n"], GEMMA3N_NAMES, GEMMA3N),
    "gemma4": gemma4("gemma4", **{"attention.head_count_kv": [2, 1, 2, 1]}),
    "gemma4/shared": gemma4("gemma4-shared", feed_forward_length=[96] * 3 + [192] * 3),
    "gemma4/experts": gemma4("gemma4-moe", expert_count=4, expert_used_count=2, final_logit_softcapping=20.0),
    "granite": (
        CASES["granite"],
        {},
        {**GRANITE, "logit_scale": 8.0},
    ),
    "olmo2": (CASES["olmo2"], AFTER, {}),
    "olmo2/olmo3": (
        Case("Olmo3Config", {"num_hidden_layers": 4, "sliding_window": 8, "rope_parameters": OLMO3_ROPES}),
        AFTER,
        {
            "attention.sliding_window": 8,
            "rope.freq_base": 500_000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
        },
    ),
    "olmo2/olmo3-pattern": (
        CASES["olmo3"],
        AFTER,
        {
            "rope.freq_base": 500_000.0,
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": [True, False, True],
        },
    ),
    "llama/window": (CASES["mistral"], {}, {"attention.sliding_window": 8}),
    "mistral3": (CASES["mistral-no-window"], {}, {}),
    "llama/experts": (CASES["mixtral"], {}, {**EXPERTS, "expert_used_count": 2, "attention.sliding_window": 8}),
    "qwen2moe": (CASES["qwen2-moe"], {}, EXPERTS),
    "qwen3moe": (CASES["qwen3-moe"], {}, EXPERTS),
    "qwen2vl": (CASES["qwen2"], {}, {"rope.dimension_sections": [2, 3, 3, 0]}),
    "qwen3vl": (CASES["qwen3"], {}, {"rope.dimension_sections": [6, 5, 5, 0], "n_deepstack_layers": 1}),
    "qwen3vlmoe": (CASES["qwen3-moe"], {}, EXPERTS),
    "olmoe": (Case("OlmoeConfig", CASES["olmoe"].settings | {"clip_qkv": None}), {}, EXPERTS),
    "granitemoe": (CASES["granitemoe"], {}, {**EXPERTS, **GRANITE, "logit_scale": 6.0}),
    "granitemoe/shared": (
        CASES["granitemoeshared"],
        {},
        {**EXPERTS, **GRANITE, "logit_scale": 6.0, "expert_shared_feed_forward_length": 40},
    ),
    "granitemoe/dense": (CASES["granite"], {}, {**GRANITE, "logit_scale": 8.0}),
    "granite_swa": granite_swa("granite_swa"),
    "granite_swa/experts": granite_swa("granitemoe_swa", **EXPERTS, expert_shared_feed_forward_length=40),
    "granitehybrid/bamba": bamba(),
    "granitehybrid": granite_hybrid("granitemoehybrid-mamba"),
    "granitehybrid/dense": granite_hybrid("granitemoehybrid-mamba-dense"),
    "falcon-h1": falcon_h1("falcon_h1"),
    "falcon-h1/normed": falcon_h1("falcon_h1-normed"),
    "mamba2": (
        CASES["mamba2"],
        NEMOTRON_NAMES,
        {
            "attention.head_count_kv": 0,
            "attention.key_length": 16,
            "feed_forward_length": 0,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 128,
            "ssm.state_size": 16,
            "ssm.time_step_rank": 8,
            "ssm.group_count": 4,
        },
    ),
    "nemotron_h": nemotron(
        "nemotron_h", layers_block_type=["linear_attention", "mlp", "linear_attention", "full_attention"]
    ),
    "nemotron_h_moe": nemotron(
        "nemotron_h", layers_block_type=["linear_attention", "moe", "full_attention", "moe", "linear_attention"]
    ),
    "nemotron_h_moe/latent": nemotron(
        "nemotron_h-latent", layers_block_type=["moe", "linear_attention", "full_attention", "linear_attention"]
    ),
    "gpt-oss": (
        Case("GptOssConfig", CASES["gpt-oss"].settings | YARN_AS_IT_IS),
        BEFORE_MLP,
        {
            **EXPERTS,
            "attention.sliding_window": 8,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
        },
    ),
    "glm4moe": (
        CASES["glm4-moe"],
        BEFORE_MLP,
        {
            **GLM4,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.5,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
        },
    ),
    "deepseek2": deepseek("deepseek_v3", is_split=True, **DEEPSEEK_YARN),
    "deepseek2/v2": deepseek("deepseek_v2", is_split=True),
    "deepseek2/lite": deepseek("deepseek_v2-lite", is_split=False, n_group=1, topk_group=1, **DEEPSEEK_YARN),
    "deepseek2/glm": deepseek("glm4_moe_lite", is_split=True, mlp_layer_types=["dense", "sparse", "sparse"]),
    "qwen35": (CASES["qwen3_5"], DELTA, QWEN35),
    "qwen35moe": (CASES["qwen3_5-moe"], DELTA, QWEN35 | EXPERTS),
    "qwen3next": (CASES["qwen3_next"], DELTA, QWEN35 | EXPERTS),
    "lfm2": lfm2("lfm2", feed_forward_length=64),
    "lfm2moe": lfm2("lfm2-moe", leading_dense_block_count=2, expert_gating_func=2, **EXPERTS),
    "glm4moe/air": (CASES["glm4-moe-air"], BEFORE_MLP, {**GLM4, "expert_shared_count": 2}),
}


def write(
    path: Path,
    arch: str,
    config: Any,
    tensors: Mapping[str, tuple[np.ndarray, Kind]],
    part_tensors: int = 0,
    **extra: Any,
) -> Path:
    """A GGUF file, as llama.cpp's converter would lay it out; with `part_tensors`, files of so many tensors each."""
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=part_tensors)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(getattr(config, "max_position_embeddings", 1 << 20))
    writer.add_embedding_length(config.hidden_size)
    if "feed_forward_length" not in extra:
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(getattr(config, "num_attention_heads", 0))
    if "attention.head_count_kv" not in extra:
        writer.add_head_count_kv(config.num_key_value_heads)
    if "attention.layer_norm_epsilon" not in extra:
        found = (getattr(config, f"{name}_eps", None) for name in ("norm", "rms_norm"))
        writer.add_layer_norm_rms_eps(next(filter(None, found), 1e-5))
    if "attention.key_length" not in extra:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_key_length(head_dim)
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
    if theta and "rope.freq_base" not in extra:
        writer.add_rope_freq_base(theta)
    for key, value in extra.items():
        kinds = {
            float: writer.add_float32,
            int: writer.add_uint32,
            str: writer.add_string,
            bool: writer.add_bool,
            list: writer.add_array,
        }
        add = kinds[type(value)]
        add(f"{arch}.{key}", value)
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, quantised(values, kind), raw_dtype=kind)
    return written(writer, path)


def convert(model: torch.nn.Module, arch: str, names: Mapping[str, str]) -> dict[str, tuple[np.ndarray, Kind]]:
    """What llama.cpp's converter does to the tensors of each architecture."""
    stored: dict[str, tuple[np.ndarray, Kind]] = {}
    table = NAMES | dict(names)
    if arch == "gemma4":  # a quarter of a head's 32 numbers is turned, in pairs
        stored["rope_freqs.weight"] = (np.float32([1.0] * 4 + [1e30] * 12), Kind.F32)
    for ours, theirs in (("altup_proj", "altup_projections"), ("altup_unembd_proj", "altup_unembed_projections")):
        stack = [
            each.detach().numpy() for name, each in model.state_dict().items() if name.startswith(f"model.{theirs}.")
        ]
        if stack:
            stored[f"{ours}.weight"] = (np.stack(stack), Kind.F32)
    for name, parameter in model.state_dict().items():
        name, values = name.replace("backbone.", "model."), parameter.detach().numpy()
        if arch == "falcon-h1":
            values = multiplied(name, values, model.config)
        if name.startswith("model.altup_"):
            continue
        if not name.startswith("model.layers."):
            stem, ending = name.rsplit(".", 1)
            stored[f"{table[stem]}.{ending}"] = (values + (arch in OFFSET and "norm" in stem), Kind.F32)
            continue
        index, role = name.removeprefix("model.layers.").split(".", 1)
        for found, part in converted_in_layer(role, values, model.config, arch, table):
            stored[f"blk.{index}.{found}"] = (np.ascontiguousarray(part), Kind.F32)
    return stored


def converted_in_layer(
    name: str, values: np.ndarray, config: Any, arch: str, table: Mapping[str, str]
) -> Iterator[tuple[str, np.ndarray]]:
    if name in (WHOLE_IN_LAYER if arch in ("gemma3n", "gemma4", "falcon-h1") else ()):
        yield WHOLE_IN_LAYER[name], values
        return
    if ".experts." in name:
        yield from experts_of(name, values, arch)
        return
    if name == "shared_mlp.input_linear.weight":
        ending, half = table["shared_mlp.output_linear"].removeprefix("ffn_down"), len(values) // 2
        parts = {"up": values} if arch == "granite_swa" else {"gate": values[:half], "up": values[half:]}
        yield from ((f"ffn_{part}{ending}.weight", rows) for part, rows in parts.items())
        return
    if name == "self_attn.sinks":
        yield "attn_sinks.weight", values
        return
    if name.endswith(("e_score_correction_bias", "expert_bias")):
        yield "exp_probs_b.bias", values
        return
    if name == "self_attn.kv_b_proj.weight" and "whole" not in table:
        keys = config.qk_nope_head_dim
        heads = values.reshape(config.num_attention_heads, keys + config.v_head_dim, -1)
        yield "attn_k_b.weight", heads[:, :keys].swapaxes(1, 2)
        yield "attn_v_b.weight", heads[:, keys:]
        return
    if name.startswith("linear_attn."):
        yield from delta_of(name, values.squeeze(), config, arch, table)
        return
    if name.startswith(OF_MAMBA):
        num_groups = config.mamba_n_groups if name.startswith("mamba.") else config.n_groups
        yield from mamba_of(name.partition(".")[2], values, num_groups)
        return
    if name == "conv.conv.weight":
        values = values.squeeze(1)
    stem, ending = name.rsplit(".", 1)
    if stem.endswith(("q_proj", "k_proj")) and arch in INTERLEAVED:
        heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    if arch in OFFSET and name.endswith("norm.weight"):
        values = values + 1
    yield f"{table[stem]}.{ending}", values[0] if stem.endswith("shared_expert_gate") else values


def mamba_of(name: str, values: np.ndarray, num_groups: int) -> Iterator[tuple[str, np.ndarray]]:
    """Mamba-2: vectors have a second dimension, and the convolution one less."""
    if name == "norm.weight":
        yield "ssm_norm.weight", values.reshape(num_groups, -1)
    elif name in ("A_log", "D"):
        yield f"ssm_{name[0].lower()}", (-np.exp(values) if name == "A_log" else values)[:, None]
    elif name == "dt_bias":
        yield "ssm_dt.bias", values
    else:
        stem, ending = name.rsplit(".", 1)
        yield f"{MAMBA_NAMES[stem]}.{ending}", values.squeeze()


def delta_of(
    name: str, values: np.ndarray, config: Any, arch: str, table: Mapping[str, str]
) -> Iterator[tuple[str, np.ndarray]]:
    """Gated DeltaNet: Qwen3-Next's fused rows of key heads are taken apart, Qwen 3.5's value heads are moved."""
    if name == "linear_attn.in_proj_qkvz.weight":
        num, key = config.linear_num_key_heads, config.linear_key_head_dim
        value = config.linear_num_value_heads // num * config.linear_value_head_dim
        parts = np.split(values.reshape(num, -1, values.shape[1]), np.cumsum([key, key, value]), axis=1)
        q, k, v, z = (part.reshape(-1, values.shape[1]) for part in parts)
        yield "attn_qkv.weight", np.concatenate((q, k, v))
        yield "attn_gate.weight", z
        return
    values = values if arch == "qwen3next" else tiled(name, values, config)
    if name.endswith("A_log"):
        yield "ssm_a", -np.exp(values)
    elif name.endswith("dt_bias"):
        yield "ssm_dt.bias", values
    else:
        stem, ending = name.rsplit(".", 1)
        yield f"{table[stem]}.{ending}", values


def tiled(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    """Move the value heads of Gated DeltaNet: the first of each key head, then the second of each."""
    num_k, num_v = config.linear_num_key_heads, config.linear_num_value_heads
    if "norm" in name:
        return values
    axis = 1 if "out_proj" in name else 0
    keys = 2 * num_k * config.linear_key_head_dim if "qkv" in name or "conv1d" in name else 0
    heads = np.arange(num_v).reshape(num_k, -1).T.ravel()
    width = (values.shape[axis] - keys) // num_v
    order = keys + (heads[:, None] * width + np.arange(width)).ravel()
    return values.take(np.concatenate((np.arange(keys), order)), axis)


def experts_of(name: str, values: np.ndarray, arch: str) -> Iterator[tuple[str, np.ndarray]]:
    """Stacks: gpt-oss transposes matrices, and its gates and ups take turns."""
    ending = "bias" if name.endswith("_bias") else "weight"
    if arch == "gpt-oss" and ending == "weight":
        values = values.swapaxes(1, 2)
    if "down_proj" in name:
        yield f"ffn_down_exps.{ending}", values
        return
    if "gate_up_proj" not in name:
        yield f"ffn_up_exps.{ending}", values
        return
    if arch == "granite_swa":
        yield "ffn_gate_up_exps.weight", values
        return
    half = values.shape[1] // 2
    yield f"ffn_gate_exps.{ending}", values[:, ::2] if arch == "gpt-oss" else values[:, :half]
    yield f"ffn_up_exps.{ending}", values[:, 1::2] if arch == "gpt-oss" else values[:, half:]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_matches_transformers(name: str, tmp_path: Path) -> None:
    case, names, extra = ARCHITECTURES[name]
    arch = name.split("/", maxsplit=1)[0]
    theirs = save_tiny(case, tmp_path / "hf")
    path = write(tmp_path / "model.gguf", arch, theirs.config, convert(theirs, arch, names), **extra)
    ids = torch.randint(3, 128, (30,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(load(path), ids, [30]), expected, atol=1e-4, rtol=1e-4)


def tiny(folder: Path, **settings: Any) -> tuple[torch.nn.Module, dict[str, tuple[np.ndarray, Kind]]]:
    theirs = save_tiny(Case("LlamaConfig", settings), folder)
    return theirs, convert(theirs, "llama", {})


@pytest.mark.parametrize("has_library", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_quantisation(name: str, has_library: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is copied out is what gguf's own dequantisation says, to the bit, chunked or whole."""
    if not has_library:
        monkeypatch.setattr(library_module, "native", lambda: None)
    kind = Kind[name]
    values = np.random.default_rng(1).standard_normal((128, 256), np.float32)
    rows = quantised(values, kind)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, value in {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 256,
        "feed_forward_length": 32,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", rows, raw_dtype=kind)
    (stored,) = GGUFCheckpoint(written(writer, tmp_path / "model.gguf")).tensors({})
    found = torch.empty(128, 256)
    stored.copy_to(found)
    chunked = torch.empty(256, 128).t()
    monkeypatch.setattr(gguf_module, "_NATIVE_CHUNK", 256 * 50)
    stored.copy_to(chunked)
    assert torch.equal(chunked, found)
    assert (stored.name, stored.shape) == ("model.embed_tokens.weight", (128, 256))
    np.testing.assert_array_equal(found.numpy(), floats_of(rows, kind).numpy())
    if name.startswith(("F", "B")) or name == "Q8_0":
        np.testing.assert_allclose(found.numpy(), values, atol=0.03)


@pytest.mark.parametrize("has_library", [True, False])
def test_nvfp4_has_a_second_scale(has_library: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number for a matrix, in a tensor of its own, and one for each expert of a stack."""
    if not has_library:
        monkeypatch.setattr(library_module, "native", lambda: None)
    case, names, extra = ARCHITECTURES["llama/experts"]
    theirs = save_tiny(Case(case.config, case.settings | {"hidden_size": 64}), tmp_path / "hf")
    plain = convert(theirs, "llama", names)
    stored, files = dict(plain), {}
    for role, factors in (("attn_q", [4.0]), ("attn_output", [0.25]), ("ffn_up_exps", [0.5, 2.0, 3.0, 1.0])):
        name, values = f"blk.1.{role}.weight", plain[f"blk.1.{role}.weight"][0]
        rows = quantised(values, Kind.NVFP4)
        floats = floats_of(rows.reshape(-1, rows.shape[-1]), Kind.NVFP4).numpy().reshape(len(factors), -1)
        floats *= np.array(factors, np.float32)[:, None]
        plain[name] = floats.reshape(values.shape), Kind.F32
        scales = np.array(factors, np.float32), Kind.F32
        stored |= {name: (values, Kind.NVFP4), f"blk.1.{role}.scale": scales, f"blk.1.{role}.input_scale": scales}
    for file, tensors in (("plain", plain), ("stored", stored)):
        files[file] = write(tmp_path / f"{file}.gguf", "llama", theirs.config, tensors, **extra)
    ids = torch.arange(3, 33)
    expected = logits_of(load(files["plain"], quantization="none"), ids, [30])
    found = logits_of(load(files["stored"], quantization="none"), ids, [30])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    as_stored = logits_of(load(files["stored"], dtype="auto"), ids, [30])
    assert ((as_stored - expected).norm(dim=-1) / expected.norm(dim=-1)).quantile(0.5) < 0.05


def test_llama3_rope_factors_come_from_their_tensor(tmp_path: Path) -> None:
    """Llama 3.1 files hold their rope scaling as one factor for each pair of dimensions, and no metadata of it."""
    theirs = save_tiny(CASES["llama-llama3"], tmp_path / "hf")
    tensors = convert(theirs, "llama", {})
    unscaled = 1.0 / 10000.0 ** (np.arange(0, 16, 2, dtype=np.float32) / 16)
    tensors["rope_freqs.weight"] = (unscaled / theirs.model.rotary_emb.inv_freq.numpy(), Kind.F32)
    ids = torch.arange(3, 33)
    with torch.no_grad():
        expected = theirs(ids[None], use_cache=False).logits[0]
    found = logits_of(load(write(tmp_path / "model.gguf", "llama", theirs.config, tensors)), ids, [30])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("extra", "scaling"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        ),
    ],
)
def test_rope_scaling_metadata(extra: dict[str, Any], scaling: dict[str, Any], tmp_path: Path) -> None:
    theirs, tensors = tiny(tmp_path / "hf")
    path = write(tmp_path / "model.gguf", "llama", theirs.config, tensors, **extra)
    found = read_config(GGUFCheckpoint(path).config.values, "here").layers[0].rope
    expected = read_config(theirs.config.to_dict() | {"rope_parameters": {"rope_theta": 10000.0, **scaling}}, "here")
    rope = expected.layers[0].rope
    assert found is not None
    assert rope is not None
    torch.testing.assert_close(found.frequencies(64), rope.frequencies(64))


def split(folder: Path) -> tuple[torch.nn.Module, list[Path]]:
    theirs, tensors = tiny(folder / "hf")
    write(folder / "tiny.gguf", "llama", theirs.config, tensors, part_tensors=13)
    return theirs, sorted(folder.glob("tiny-*.gguf"))


def test_the_first_part_of_a_split_file_loads_all(tmp_path: Path) -> None:
    theirs, parts = split(tmp_path)
    assert [part.name for part in parts] == [f"tiny-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    ids = torch.arange(3, 33)
    with torch.no_grad():
        expected = theirs(ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(load(parts[0]), ids, [30]), expected, atol=1e-4, rtol=1e-4)
    files = {stored.file for stored in GGUFCheckpoint(parts[0]).tensors({})}
    assert files == set(map(str, parts))


def test_wrong_parts_are_said(tmp_path: Path) -> None:
    _, parts = split(tmp_path)
    third = parts[2].read_bytes()
    with pytest.raises(
        ModelLoadError, match=r"tiny-00002-of-00003.gguf is a part .* name the first part, tiny-00001-of"
    ):
        GGUFCheckpoint(parts[1])
    parts[2].unlink()
    with pytest.raises(ModelLoadError, match=r"3 parts, and tiny-00003-of-00003.gguf is missing; download all parts"):
        GGUFCheckpoint(parts[0])
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(ModelLoadError, match=r"tiny-00003-of-00003\.gguf is not part 3 of 3; download it again"):
        GGUFCheckpoint(parts[0])
    parts[2].write_bytes(third[:-1000])
    with pytest.raises(ModelLoadError, match=r"tiny-00003-of-00003\.gguf is truncated"):
        GGUFCheckpoint(parts[0])
    parts[0].rename(tmp_path / "other.gguf")
    with pytest.raises(ModelLoadError, match="one of 3 parts of a model but is not named as such"):
        GGUFCheckpoint(tmp_path / "other.gguf")


@pytest.mark.parametrize("cut", ["header", "tensors", "magic", "empty"])
def test_a_damaged_file_is_refused(cut: str, tmp_path: Path) -> None:
    theirs, tensors = tiny(tmp_path / "hf")
    path = write(tmp_path / "model.gguf", "llama", theirs.config, tensors)
    whole = path.read_bytes()
    path.write_bytes({"header": whole[:200], "tensors": whole[:-1000], "magic": b"GGML" + whole[4:], "empty": b""}[cut])
    with pytest.raises(ModelLoadError, match=r"model\.gguf is truncated or"):
        GGUFCheckpoint(path)


def test_a_file_that_becomes_shorter_is_that_models_fault(tmp_path: Path) -> None:
    """As one that is overwritten: its map would end the process, and the models beside it."""
    theirs, tensors = tiny(tmp_path)
    path = write(tmp_path / "model.gguf", "llama", theirs.config, tensors)
    norm = next(each for each in GGUFCheckpoint(path).tensors({}) if each.name == "model.norm.weight")
    os.truncate(path, 4096)
    with pytest.raises(ModelLoadError, match="became shorter while it was being loaded"):
        norm.copy_to(torch.empty(norm.shape))


def test_any_header_byte_may_be_wrong(tmp_path: Path) -> None:
    """A corrupt header is told in a sentence or read as something else; it never escapes as another exception."""
    theirs, tensors = tiny(tmp_path / "hf")
    path = write(tmp_path / "model.gguf", "llama", theirs.config, tensors)
    whole = path.read_bytes()
    refused = 0
    for at in range(4, 900, 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xA5]) + whole[at + 1 :])
        try:
            read_config(GGUFCheckpoint(path).config.values, str(path))
        except ModelLoadError:
            refused += 1
    assert refused > 50


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    theirs, tensors = tiny(tmp_path / "hf")
    with pytest.raises(ModelLoadError, match="'rwkv6' is not supported in GGUF files; Quire reads llama,"):
        GGUFCheckpoint(write(tmp_path / "model.gguf", "rwkv6", theirs.config, tensors))


def test_an_unread_quantisation_is_named(tmp_path: Path) -> None:
    theirs, tensors = tiny(tmp_path / "hf", hidden_size=256)
    path = write(tmp_path / "model.gguf", "llama", theirs.config, tensors)
    whole, name = path.read_bytes(), b"blk.0.attn_output.weight"
    at = whole.index(name) + len(name) + 4 + 2 * 8  # behind the number of dimensions, and these
    for kind, reason in ((31, "ggml has removed"), (77, "is unknown")):
        path.write_bytes(whole[:at] + struct.pack("<I", kind) + whole[at + 4 :])
        with pytest.raises(
            ModelLoadError, match=f"'{name.decode()}' is stored as type {kind}, which {reason}; Quire reads F32"
        ):
            GGUFCheckpoint(path)


@pytest.mark.parametrize("style", ["merged", "alone"])
def test_experts_that_are_stored_in_other_ways(style: str, tmp_path: Path) -> None:
    """New files may merge gates and ups; files of before 2024 have every expert by itself."""
    case, names, extra = ARCHITECTURES["llama/experts"]
    theirs = save_tiny(case, tmp_path / "hf")
    tensors = convert(theirs, "llama", names)
    for layer in range(3):
        gate, up, down = (tensors.pop(f"blk.{layer}.ffn_{role}_exps.weight")[0] for role in ("gate", "up", "down"))
        if style == "merged":
            tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = (np.concatenate((gate, up), axis=1), Kind.F32)
            tensors[f"blk.{layer}.ffn_down_exps.weight"] = (down, Kind.F32)
            continue
        for expert in range(8):
            for role, stack in (("gate", gate), ("up", up), ("down", down)):
                tensors[f"blk.{layer}.ffn_{role}.{expert}.weight"] = (stack[expert], Kind.F32)
    ids = torch.arange(3, 33)
    with torch.no_grad():
        expected = theirs(ids[None], use_cache=False).logits[0]
    found = logits_of(load(write(tmp_path / "model.gguf", "llama", theirs.config, tensors, **extra)), ids, [30])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_layers_for_later_tokens_are_left_out(tmp_path: Path) -> None:
    case, names, extra = ARCHITECTURES["glm4moe/air"]
    theirs = save_tiny(case, tmp_path / "hf")
    tensors = convert(theirs, "glm4moe", names)
    tensors["blk.3.nextn.eh_proj.weight"] = (np.zeros((64, 128), np.float32), Kind.F32)
    tensors["blk.3.attn_norm.weight"] = (np.zeros(64, np.float32), Kind.F32)
    theirs.config.num_hidden_layers = 4
    path = write(tmp_path / "model.gguf", "glm4moe", theirs.config, tensors, nextn_predict_layers=1, **extra)
    assert len(read_config(GGUFCheckpoint(path).config.values, "here").layers) == 3
    load(path)


def test_experts_where_an_architecture_has_none_are_refused(tmp_path: Path) -> None:
    theirs, tensors = tiny(tmp_path / "hf")
    with pytest.raises(ModelLoadError, match=r"'expert_count' is 8, .*qwen2 has no mixture of experts; llama, "):
        GGUFCheckpoint(write(tmp_path / "model.gguf", "qwen2", theirs.config, tensors, expert_count=8))
    with pytest.raises(ModelLoadError, match=r"has 'expert_count' but no tensor 'ffn_up_exps'"):
        GGUFCheckpoint(write(tmp_path / "other.gguf", "qwen3moe", theirs.config, tensors, **EXPERTS))


SIZES_OF_MAMBA: dict[str, Any] = {
    **{key: value for key, value in granite_hybrid("granitemoehybrid-mamba")[2].items() if "expert" not in key},
    "attention.head_count_kv": [0, 2],
}


@pytest.mark.parametrize(
    ("arch", "metadata", "tensor", "found"),
    [
        ("deepseek2", {"expert_weights_norm": True}, "blk.1.exp_probs_b.bias", "deepseek_v3"),
        ("deepseek2", {}, "", "deepseek_v2"),
        ("deepseek2", {"expert_gating_func": 3}, "", "Quire needs 1 or 2, a softmax or a sigmoid"),
        ("glm4moe", {"expert_gating_func": 1}, "", "Quire needs 2, a sigmoid"),
        ("deepseek2", {"feed_forward_length": [96, 96]}, "", "deepseek_v2"),
        (
            "deepseek2",
            {"feed_forward_length": [96, 48]},
            "",
            "'feed_forward_length' differs between layers (96, 48]...)",
        ),
        ("mistral3", {"attention.temperature_scale": 0.1}, "", "its queries are scaled by their position"),
        ("granitehybrid", SIZES_OF_MAMBA, "", "granitemoehybrid"),
        ("lfm2", {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3}, "", "lfm2"),
        ("lfm2", {"attention.causal": False}, "", "Quire needs true: its embedding models"),
        ("lfm2", {"attention.sliding_window": 8}, "", "its layers with attention see all positions"),
        ("lfm2moe", {"expert_gating_func": 1}, "", "Quire needs 2, a sigmoid"),
        (
            "granitehybrid",
            SIZES_OF_MAMBA | {"ssm.time_step_rank": 5},
            "",
            "'ssm.time_step_rank' is 5; Quire needs a number that divides ssm.inner_size, 128",
        ),
        ("granitehybrid", SIZES_OF_MAMBA | {"attention.head_count_kv": 2}, "", "'layer_types' is missing"),
        (
            "nemotron_h_moe",
            SIZES_OF_MAMBA | {"attention.head_count_kv": [2]},
            "",
            "'block_count' is 2; Quire needs 1, as many as attention.head_count_kv has numbers",
        ),
        (
            "granitehybrid",
            SIZES_OF_MAMBA | {"attention.head_count_kv": [1, 2]},
            "",
            "'attention.head_count_kv' differs between layers (1, 2]...)",
        ),
    ],
)
def test_what_metadata_leaves_to_the_architecture(arch: str, metadata: dict[str, Any], tensor: str, found: str) -> None:
    """Old files of DeepSeek do not name the router's function: its correction goes with a sigmoid."""
    sizes = {"block_count": 2, "context_length": 64, "embedding_length": 64, "feed_forward_length": 96}
    heads = {"head_count": 4, "layer_norm_rms_epsilon": 1e-6, "kv_lora_rank": 24, "key_length": 24, "value_length": 16}
    routing = {"expert_count": 8, "expert_used_count": 3} if arch not in ("mistral3", "lfm2") else {}
    keys = sizes | {f"attention.{key}": value for key, value in heads.items()} | routing | metadata
    keys |= {"rope.dimension_count": 8}
    shapes = {"token_embd.weight": (128, 64), "blk.1.ffn_up_exps.weight": (8, 24, 64), tensor: (8,)}
    named = {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in keys.items()}
    try:
        assert hf_config(named, shapes, {}, "here")[1]["model_type"] == found
    except ModelLoadError as error:
        assert found in str(error)  # noqa: PT017 - a sentence is a result as well


@pytest.mark.filterwarnings("ignore")
def test_the_default_model_matches_transformers(transformers_smollm2: Any) -> None:
    """Real weights, dequantised by two programs that share nothing but gguf's block formats."""
    path = Path(find_model(None).path)
    ids = torch.randint(0, 49152, (24,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = transformers_smollm2(ids[None], use_cache=False).logits[0]
    found = logits_of(load(path), ids, [16, 8])
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
