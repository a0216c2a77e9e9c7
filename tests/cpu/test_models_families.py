"""Every family's forward pass, from a saved tiny checkpoint, against transformers' own implementation in float32."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PretrainedConfig

from engine.core.types import Progress
from engine.runtime.models.decoder import Decoder
from engine.runtime.models.families import FAMILIES
from engine.runtime.models.load import load_model
from engine.runtime.native.library import native
from engine.settings.engine_config import EngineConfig
from tests.cpu.dense_attention import DenseAttention

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NUM_TOKENS = 40


@dataclass(frozen=True)
class Case:
    """One tiny model: the family's config class, and what it sets beside SIZES."""

    config: str
    settings: dict[str, Any] = field(default_factory=dict)

    def build(self) -> PretrainedConfig:
        if not hasattr(transformers, self.config):
            pytest.skip(f"transformers {transformers.__version__} has no {self.config}")
        return getattr(transformers, self.config)(**(SIZES | self.settings))


def rope(kind: str, **params: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **params}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16)
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
}
LATENT_YARN = rope("yarn", factor=40.0, original_max_position_embeddings=16, mscale=0.707, mscale_all_dim=1.0)
# Factors for a rotary width of 12: Phi-4-mini's three quarters of a head of 16.
LONG = {"short_factor": [1.0 + i / 10 for i in range(6)], "long_factor": [2.0 + i for i in range(6)]}

QWEN3_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 32}
QWEN3_5 = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
QWEN3_5_MOE = QWEN3_5 | {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
GPT_OSS = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 24,
    "head_dim": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
GRANITE_MOE = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 24,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 6.0,
    "tie_word_embeddings": True,
}
MAMBA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
}
FALCON_H1 = {
    "head_dim": 24,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 8,
    "mamba_n_groups": 4,
    "mamba_d_state": 16,
    "embedding_multiplier": 5.6,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.9,
    "key_multiplier": 0.4,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.6, 0.8, 1.4, 0.5, 1.7],
    "mlp_multipliers": [1.6, 0.5],
    "lm_head_multiplier": 0.4,
}
MAMBA2 = {"num_heads": 8, "head_dim": 16, "n_groups": 4, "state_size": 16, "use_bias": True}
NEMOTRON = {
    "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "moe"],
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 4,
    "ssm_state_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
}
GLM4 = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "head_dim": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}

LFM2 = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "block_multiple_of": 8,
    "tie_word_embeddings": True,
}

LFM3 = {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "sliding_window": 8,
    "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
}
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 128,
}

CASES = {
    "llama": Case("LlamaConfig"),
    "llama-tied-biased": Case("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": Case("LlamaConfig", {"head_dim": 32}),
    "llama-linear": Case("LlamaConfig", rope("linear", factor=2.5)),
    "llama-dynamic": Case("LlamaConfig", rope("dynamic", factor=2.0)),
    "llama-llama3": Case("LlamaConfig", LLAMA3),
    "llama-yarn": Case("LlamaConfig", YARN),
    "llama-yarn-mscale": Case(
        "LlamaConfig",
        rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.8, truncate=False),
    ),
    "mistral": Case("MistralConfig", {"sliding_window": 8}),
    "mistral-no-window": Case("MistralConfig", {"sliding_window": None}),
    "qwen2": Case("Qwen2Config"),
    "qwen2-window": Case("Qwen2Config", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": Case("Qwen3Config", {"head_dim": 32}),
    "qwen3-biased": Case("Qwen3Config", {"attention_bias": True, "tie_word_embeddings": True}),
    "smollm3": Case("SmolLM3Config", {"no_rope_layer_interval": 2}),
    "smollm3-window": Case(
        "SmolLM3Config", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 8}
    ),
    "phi3": Case("Phi3Config", {"sliding_window": 8}),
    "phi3-longrope-short": Case(
        "Phi3Config",
        rope("longrope", partial_rotary_factor=0.75, **LONG) | {"original_max_position_embeddings": 64},
    ),
    "phi3-longrope-long": Case(
        "Phi3Config",
        rope("longrope", partial_rotary_factor=0.75, **LONG) | {"original_max_position_embeddings": 16},
    ),
    "gemma": Case("GemmaConfig", {"head_dim": 32}),
    "gemma2": Case("Gemma2Config", {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 24}),
    "gemma2-uncapped": Case(
        "Gemma2Config",
        {"head_dim": 32, "sliding_window": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": Case(
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3_5-attention": Case("Qwen3_5TextConfig", {"head_dim": 32, "layer_types": ["full_attention"] * 3}),
    "qwen3_5": Case("Qwen3_5TextConfig", QWEN3_5),
    "qwen3_next": Case("Qwen3NextConfig", QWEN3_5_MOE),
    "qwen3_5-moe": Case("Qwen3_5MoeTextConfig", QWEN3_5_MOE),
    "granite": Case(
        "GraniteConfig",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_v2": Case(
        "DeepseekV2Config",
        LATENT | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0, "qk_nope_head_dim": 16},
    ),
    "deepseek_v2-lite": Case("DeepseekV2Config", LATENT | LATENT_YARN | {"q_lora_rank": None}),
    "glm4_moe_lite": Case("Glm4MoeLiteConfig", LATENT | {"mlp_layer_types": ["dense", "sparse", "dense"]}),
    "deepseek_v3": Case("DeepseekV3Config", LATENT | LATENT_YARN),
    "deepseek_v3-halves-biased": Case(
        "DeepseekV3Config",
        LATENT | {"rope_interleave": False, "attention_bias": True, "rms_norm_eps": 1e-2, "first_k_dense_replace": 3},
    ),
    "olmo2": Case("Olmo2Config"),
    "olmo3": Case(
        "Olmo3Config",
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "qwen2-moe": Case(
        "Qwen2MoeConfig",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe": Case("Qwen3MoeConfig", QWEN3_MOE | {"norm_topk_prob": True, "decoder_sparse_step": 2}),
    "qwen3-moe-not-normalised": Case("Qwen3MoeConfig", QWEN3_MOE),
    "mixtral": Case("MixtralConfig", {"num_local_experts": 8, "intermediate_size": 24, "sliding_window": 8}),
    "olmoe": Case(
        "OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24, "clip_qkv": 0.5}
    ),
    "granitemoe": Case("GraniteMoeConfig", GRANITE_MOE),
    "granitemoeshared": Case("GraniteMoeSharedConfig", GRANITE_MOE | {"shared_intermediate_size": 40}),
    "granitemoehybrid": Case(
        "GraniteMoeHybridConfig",
        GRANITE_MOE
        | {"shared_intermediate_size": 40, "position_embedding_type": "rope", "layer_types": ["full_attention"] * 3},
    ),
    "granitemoehybrid-dense": Case(
        "GraniteMoeHybridConfig",
        GRANITE_MOE | {"num_local_experts": 0, "shared_intermediate_size": 72, "layer_types": ["full_attention"] * 3},
    ),
    "granitemoehybrid-mamba": Case("GraniteMoeHybridConfig", GRANITE_MOE | MAMBA | {"shared_intermediate_size": 40}),
    "granitemoehybrid-mamba-dense": Case(
        "GraniteMoeHybridConfig",
        GRANITE_MOE
        | MAMBA
        | {"num_local_experts": 0, "shared_intermediate_size": 72, "position_embedding_type": "rope"}
        | {
            "mamba_n_groups": 1,
            "mamba_d_head": 16,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
        }
        | {"time_step_limit": [0.9, 1.3], "layer_types": ["linear_attention", "full_attention", "full_attention"]},
    ),
    "granite_swa": Case(
        "GraniteSWAConfig",
        {key: value for key, value in GRANITE_MOE.items() if "multiplier" in key or "scaling" in key}
        | {"sliding_window": 8, "layer_rope_theta": [10_000.0, 0, 500.0], "attention_bias": True, "mlp_bias": True},
    ),
    "granitemoe_swa": Case("GraniteMoeSWAConfig", GRANITE_MOE | {"sliding_window": 8, "shared_intermediate_size": 40}),
    "bamba": Case(
        "BambaConfig",
        {key: value for key, value in MAMBA.items() if key != "layer_types"}
        | {"attn_layer_indices": [1], "mamba_n_groups": 1, "mamba_d_state": 8}
        | {"time_step_limit": [0.9, 1.3], "mlp_bias": True},
    ),
    "falcon_h1": Case("FalconH1Config", FALCON_H1),
    "falcon_h1-normed": Case(
        "FalconH1Config",
        FALCON_H1
        | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_conv_bias": False, "mamba_d_ssm": None}
        | {"time_step_limit": [0.9, 1.3], "tie_word_embeddings": True},
    ),
    "mamba2": Case("Mamba2Config", MAMBA2),
    "nemotron_h": Case("NemotronHConfig", NEMOTRON),
    "nemotron_h-latent": Case(
        "NemotronHConfig",
        NEMOTRON
        | {"layers_block_type": ["moe", "linear_attention", "full_attention", "mlp", "linear_attention"]}
        | {"moe_latent_size": 32, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "time_step_min": 1.1}
        | {"use_bias": True, "use_conv_bias": False, "n_groups": 1, "tie_word_embeddings": False},
    ),
    "gpt-oss": Case("GptOssConfig", GPT_OSS),
    "glm4-moe": Case(
        "Glm4MoeConfig",
        GLM4
        | {"use_qk_norm": True, "attention_bias": True, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5},
    ),
    "glm4-moe-air": Case(
        "Glm4MoeConfig", GLM4 | {"norm_topk_prob": False, "n_shared_experts": 2, "num_nextn_predict_layers": 1}
    ),
    "lfm2": Case("Lfm2Config", LFM2),
    "lfm2-biased": Case(
        "Lfm2Config",
        LFM2 | {"conv_bias": True, "conv_L_cache": 7, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False},
    ),
    "lfm2-moe": Case(
        "Lfm2MoeConfig",
        LFM2 | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "routed_scaling_factor": 1.5},
    ),
    "lfm3": Case("Lfm3Config", LFM3),
    "lfm3-ungated": Case(
        "Lfm3Config",
        LFM3 | {"use_attention_gate": False, "conv_bias": True, "conv_L_cache": 3, "tie_word_embeddings": False},
    ),
    "gemma3n": Case(
        "Gemma3nTextConfig",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 100,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        },
    ),
    "gemma4": Case("Gemma4TextConfig", GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4-shared": Case(  # the last three layers take K and V of the second and the third; an embedding a layer
        "Gemma4TextConfig",
        GEMMA4
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "num_hidden_layers": 6}
        | {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
    ),
    "gemma4-moe": Case(
        "Gemma4TextConfig",
        GEMMA4
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
        | {"final_logit_softcapping": 20.0},
    ),
    "gemma4-unified": Case(
        "Gemma4UnifiedTextConfig",
        {key: value for key, value in GEMMA4.items() if not key.endswith("per_layer_input")}
        | {"num_kv_shared_layers": 2},
    ),
}

# The cases that tests/gpu/ serves on a device, beside those of tests/gpu/features.py.
ON_A_GPU = (
    *("llama-llama3", "qwen3", "gemma2", "qwen3-moe", "gpt-oss", "deepseek_v3"),
    *("qwen3_5", "lfm2", "granitemoehybrid-mamba", "nemotron_h"),
)
ONCE_ON_A_GPU = ("gemma3n", "gemma4-shared", "falcon_h1", "nemotron_h-latent")  # in one of those tests


class Saved(NamedTuple):
    """A random model of transformers, its files, and where torch's random numbers were left."""

    model: torch.nn.Module
    files: dict[str, bytes]
    random_state: torch.Tensor


_SAVED: dict[str, Saved] = {}  # by case: hundreds of tests take one that another has had


def saved(case: Case) -> Saved:
    """Norms and biases are random too, so that none can be forgotten."""
    if (known := _SAVED.get(repr(case))) is not None:
        torch.set_rng_state(known.random_state)
        return known
    torch.manual_seed(0)
    config = case.build()
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.normal_(std=0.3 if "embed" in name else 0.15)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(std=0.2)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return _SAVED.setdefault(repr(case), Saved(model, files, torch.get_rng_state()))


def write_tiny(case: Case, folder: Path) -> None:
    """Write the files of a random model."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in saved(case).files.items():
        (folder / name).write_bytes(content)


def save_tiny(case: Case, folder: Path) -> torch.nn.Module:
    """Write a random model, and return transformers' own, which the caller may change."""
    write_tiny(case, folder)
    return deepcopy(saved(case).model)


def load(folder: Path, **settings: Any) -> Decoder:
    settings = {"model": str(folder), "model_impl": "quire", "dtype": "float32"} | settings
    model = load_model(EngineConfig(**settings), torch.device("cpu"), torch.float32, lambda progress: None)
    assert isinstance(model, Decoder)
    return model


def logits_of(model: Decoder, ids: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    """Logits at every position, computed `chunks` tokens at a time."""
    attention = DenseAttention(model.states)
    positions = torch.arange(len(ids))
    with torch.inference_mode():
        parts = [
            model.logits(model.forward(some, at, attention))
            for some, at in zip(ids.split(chunks), positions.split(chunks), strict=True)
        ]
    return torch.cat(parts)


@pytest.mark.parametrize("name", CASES)
def test_matches_transformers(name: str, tmp_path: Path) -> None:
    theirs = save_tiny(CASES[name], tmp_path)
    ids = torch.randint(3, 128, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(ids[None], use_cache=False).logits[0]
    model = load(tmp_path)
    assert (model._native is None) == (native() is None)
    whole = logits_of(model, ids, [NUM_TOKENS])
    assert whole.dtype == torch.float32
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits_of(model, ids, [17, 11] + [1] * 12), expected, atol=1e-4, rtol=1e-4)
    assert expected.std() > 0.1  # a model that answers nothing would prove nothing


def test_every_family_has_a_case() -> None:
    covered = {case.build().model_type for case in CASES.values()}
    assert covered == set(FAMILIES) - {"eurobert"}  # it attends both ways: test_encoders.py compares it


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_is_as_near_the_truth_as_transformers(name: str, tmp_path: Path) -> None:
    """Rounding differs from theirs in places; it must not be worse. The truth is float32 with the same weights.

    The lower quartile of tokens counts: rounding changes an expert where two are nearly equal, in either library.
    """
    truth = save_tiny(CASES[name], tmp_path).bfloat16().float()
    truth.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager").eval()
    ids = torch.randint(3, 128, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        exact, rounded = (model(ids[None], use_cache=False).logits[0].float() for model in (truth, theirs))
    model = load_model(EngineConfig(model=str(tmp_path)), torch.device("cpu"), torch.bfloat16, lambda progress: None)
    assert isinstance(model, Decoder)
    ours = logits_of(model, ids, [NUM_TOKENS])
    error, their_error = ((found - exact).square().mean(-1).quantile(0.25) for found in (ours, rounded))
    assert error < 1.25 * their_error
    assert (ours - exact).abs().max() > 0  # it did run in bfloat16


PUBLISHED: dict[str, tuple[dict[str, Any], set[str]]] = {  # settings that config.json has instead of others
    "nemotron_h": (
        {"hybrid_override_pattern": "M-M*E", "num_hidden_layers": 5, "attention_head_dim": 16},
        {"layers_block_type", "head_dim"},
    ),
    "bamba": ({"rope_theta": 10_000.0, "attn_rotary_emb": 8}, {"rope_parameters"}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_is_read_as_published(name: str, tmp_path: Path) -> None:
    """Older settings; a head for later tokens, which Nemotron has beside its layers, is left out."""
    write_tiny(CASES[name], tmp_path)
    ids = torch.arange(3, 43)
    expected = logits_of(load(tmp_path), ids, [40])
    old, new = PUBLISHED[name]
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({key: values[key] for key in values.keys() - new} | old))
    if name == "nemotron_h":
        tensors = load_file(tmp_path / "model.safetensors")
        save_file(tensors | {"mtp.layers.0.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    assert torch.equal(logits_of(load(tmp_path), ids, [40]), expected)


@pytest.mark.parametrize("spelling", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("impl", ["quire", "transformers"])
def test_longrope_equals_transformers_where_the_factors_are_those_of_the_length(
    impl: str, spelling: str, tmp_path: Path
) -> None:
    """Phi-3 has had three names for it. The start says which factors are in force."""
    theirs = save_tiny(CASES["phi3-longrope-long"], tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["rope_parameters"]["rope_type"] = spelling
    (tmp_path / "config.json").write_text(json.dumps(values))
    for max_model_len, length, said in ((16, 12, "LongRoPE's short"), (None, NUM_TOKENS, "LongRoPE's long")):
        progress: list[Progress] = []
        config = EngineConfig(model=str(tmp_path), model_impl=impl, max_model_len=max_model_len)
        model = load_model(config, torch.device("cpu"), torch.float32, progress.append)
        ids = torch.arange(3, 3 + length)
        with torch.inference_mode():
            expected = theirs(ids[None], use_cache=False).logits[0]
            hidden = model.forward(ids, torch.arange(length), DenseAttention(model.states))
            torch.testing.assert_close(model.logits(hidden), expected, atol=1e-4, rtol=1e-4)
        (line,) = (each.detail for each in progress if each.stage == "positions")
        assert line.startswith(f"{said} factors")
