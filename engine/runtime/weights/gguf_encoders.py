"""Metadata of GGUF files of encoders as a config.json."""

from __future__ import annotations

from typing import Any

from engine.core.errors import ModelLoadError
from engine.runtime.weights.gguf_config import File, gemma3, has


def bert(file: File) -> dict[str, Any]:
    """BERT, and RoBERTa and XLM-R, whose positions the converter cuts to those that are used."""
    _refuse(file)
    rows = file.shapes.get("position_embd.weight", (file.meta.size("context_length"),))[0]
    return {
        "layer_norm_eps": file.meta.positive("attention.layer_norm_epsilon", 1e-12),
        "max_position_embeddings": min(rows, file.meta.size("context_length")),
        "num_position_rows": rows,
        "type_vocab_size": file.shapes["token_types.weight"][0] if "token_types.weight" in file.shapes else 0,
        "hidden_act": "gelu",
    }


def nomic_bert(file: File) -> dict[str, Any]:
    """NomicBERT without experts."""
    return {**bert(file), "hidden_act": "silu"}


def modern_bert(file: File) -> dict[str, Any]:
    """ModernBERT."""
    _refuse(file)
    meta = file.meta
    return {
        "norm_eps": meta.positive("attention.layer_norm_epsilon", 1e-5),
        "local_attention": meta.size("attention.sliding_window", 128),
        "global_attn_every_n_layers": meta.size("attention.sliding_window_pattern", 3),
        "global_rope_theta": meta.positive("rope.freq_base", 160_000.0),
        "local_rope_theta": meta.positive("rope.freq_base_swa", 10_000.0),
        "hidden_activation": meta.text("hidden_act", "gelu"),
        "attention_bias": has(file, "attn_qkv.bias"),
        "rope_scaling": None,
        "rope_theta": None,
    }


def gemma_embedding(file: File) -> dict[str, Any]:
    """EmbeddingGemma: Gemma 3 that attends both ways."""
    _refuse(file)
    return {**gemma3(file), "use_bidirectional_attention": True}


def _refuse(file: File) -> None:
    """Raise ModelLoadError for a file with more behind its last layer."""
    if any(name.startswith(("dense_", "cls")) for name in file.shapes):
        raise ModelLoadError(
            f"{file.meta.source}: the file has dense modules or a classifier's head, which are read from safetensors alone."
        )
