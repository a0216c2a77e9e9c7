"""Serves a tiny model of each causal kind of the installed transformers, and prints what became of it.

    python -m tests.cpu.all_kinds [KIND ...]

A row says that Quire's decoder or transformers' code serves the kind, with the largest difference from transformers in log
probabilities through the engine (chunks, batch mates, preemption, hits of the prefix cache), or the refusal, and whether
the config alone decided. Each kind has a process and `LIMIT_S` seconds. A row with "LATE", "DIFFERS" or "CRASH" is a defect.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.core.errors import ModelLoadError
from engine.runtime.kv_layout import RecurrentSpec
from engine.runtime.models.load import load_model
from engine.runtime.models.transformers_adapter import read_foreign_config
from engine.settings.engine_config import EngineConfig
from engine.startup.model_check import check_model
from tests.cpu.engine_logprobs import TIGHT, largest_difference
from tests.cpu.model_driver import state_blocks

LIMIT_S = 60
MOST_DIFFERENCE = 1e-3  # in float32, with weights so large that logits are, too
# By what the names of a config's settings begin or end with; the first that a config has a whole number for counts.
_SIZES = {
    "vocab_size": 128, "vocab_size_per_layer_input": 128, "hidden_size": 64, "n_embd": 64, "d_model": 64, "dim": 64,
    "embedding_size": 64, "word_embed_proj_dim": 64, "intermediate_size": 96, "ffn_dim": 96, "n_inner": 96, "d_ff": 96,
    "ffn_hidden_size": 96, "decoder_ffn_dim": 96, "encoder_ffn_dim": 96, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32, "shared_expert_intermediate_size": 32, "shared_intermediate_size": 32,
    "dense_intermediate_size": 96, "intermediate_size_mlp": 96, "expert_ffn_hidden_size": 32, "block_ff_dim": 96,
    "num_hidden_layers": 4, "n_layer": 4, "num_layers": 4, "n_layers": 4, "decoder_layers": 4, "encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 16, "global_head_dim": 32,
    "num_global_key_value_heads": 2, "swa_head_dim": 16, "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64,
    "max_seq_len": 64, "model_max_length": 64, "original_max_position_embeddings": 64,
    "sliding_window": 8, "window_size": 8, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "moe_num_experts": 4, "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "top_k": 2,
    "top_k_experts": 2, "n_shared_experts": 1, "num_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "num_expert_group": 1, "first_k_dense_replace": 1, "moe_layer_start_index": 1, "kv_lora_rank": 16,
    "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "qk_head_dim": 24,
    "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "laurel_rank": 8, "altup_num_inputs": 2, "state_size": 8, "num_mem_blocks": 1,
    "dim_model_base": 32, "attention_head_dim": 16,
}  # fmt: skip

_TYPES = ["sliding_attention", "full_attention"] * 2
_MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 8}
_HYBRID = ["linear_attention", "full_attention"] * 2
_DELTA = {"layer_types": _HYBRID, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
# Kinds whose settings depend on each other.
_MORE: dict[str, dict[str, Any]] = {
    "gemma4_text": {"layer_types": _TYPES},
    "gemma4_unified_text": {"layer_types": _TYPES},
    "cohere_compass_text": {"layer_types": _TYPES},
    "lfm2_moe": {"layer_types": ["full_attention"] * 4},
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), _DELTA),
    "granitemoehybrid": {"layer_types": _HYBRID} | _MAMBA,
    "bamba": {"attn_layer_indices": [1, 3]} | _MAMBA,
    "lfm3": {"layer_types": ["conv", "sliding_attention", "full_attention", "conv"]},
    "falcon_h1": {"mamba_d_ssm": 128} | _MAMBA,
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "sliding_window": None,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma3n_text": {"layer_types": _TYPES, "intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.0] * 4},
}


def tiny(kind: str) -> Any:
    """Return a small config of a kind; what does not fit is left as the kind's own default."""
    make = CONFIG_MAPPING[kind]
    default = make()
    known = {**default.to_dict(), **{name: getattr(default, name, None) for name in default.attribute_map}}
    sizes = {
        name: size
        for name, size in _SIZES.items()
        if isinstance(known.get(name), int) or (known.get(name) is None and hasattr(default, name))
    }
    if "kv_lora_rank" in sizes:
        sizes["num_key_value_heads"] = sizes.get("num_attention_heads", 4)
        if "head_dim" in sizes:
            sizes["head_dim"] = sizes.get("qk_rope_head_dim", 16)
    return make(**sizes | _MORE.get(kind, {}))


def outcome(kind: str, folder: Path) -> str:
    """Return a row's text. Raises what was not foreseen."""
    try:
        config, is_tiny = tiny(kind), True
    except Exception:
        config, is_tiny = CONFIG_MAPPING[kind](), False
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is not None:
        config.architectures = [model_class.__name__]
    config.save_pretrained(folder)
    settings = EngineConfig(model=str(folder), load_format="dummy")
    try:
        facts = check_model(settings)
    except ModelLoadError as refusal:
        return f"refused: {str(refusal).removeprefix(str(folder))}"
    served = "native" if facts.is_native else "adapter"
    if not is_tiny:
        return f"UNTRIED {served}: the table of sizes fits no small model of it"
    if not facts.is_native:
        try:
            read_foreign_config(folder)
        except ModelLoadError as refusal:
            return f"LATE, by its class: {str(refusal).removeprefix(str(folder))}"
    torch.manual_seed(0)
    try:
        theirs = model_class(config).float().eval()
    except Exception as error:
        return f"CRASH of transformers' own, nothing to compare: {_line(error)}"
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.3) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.save_pretrained(folder)
    theirs = model_class.from_pretrained(
        folder, dtype=torch.float32
    ).eval()  # what a file does not keep is not compared
    try:
        with torch.no_grad():
            theirs(torch.arange(3, 30)[None], use_cache=False)
    except Exception as error:
        return f"CRASH of transformers' own forward: {_line(error)}"
    try:
        ours = load_model(EngineConfig(model=str(folder)), torch.device("cpu"), torch.float32, lambda _: None)
    except ModelLoadError as refusal:
        return f"LATE {served} refused: {str(refusal).removeprefix(str(folder))}"
    config = TIGHT
    if any(isinstance(spec, RecurrentSpec) for spec in ours.states):
        size = state_blocks(ours, TIGHT.block_size)
        config = replace(TIGHT, num_blocks=TIGHT.num_blocks + 6 * size, state_blocks=size)
    worst = largest_difference(ours, theirs, config=config)
    return f"{'' if worst < MOST_DIFFERENCE else 'DIFFERS '}{served} {worst:.1e}"


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def main(kinds: Iterable[str]) -> None:
    """Print a row for each kind."""
    torch.set_num_threads(1)
    for kind in kinds or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        sys.stdout.flush()
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            if status:
                print(f"{kind:28} CRASH or more than {LIMIT_S} s: status {status}", flush=True)
            continue
        signal.alarm(LIMIT_S)
        with tempfile.TemporaryDirectory() as folder:
            try:
                text = outcome(kind, Path(folder))
            except BaseException as error:
                text = f"CRASH {_line(error)}"
        print(f"{kind:28} {text}", flush=True)
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
