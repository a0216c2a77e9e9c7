"""Metadata of GGUF files of encoders as a config.json."""

from __future__ import annotations

from typing import Any

from engine.core.errors import ModelLoadError
from engine.runtime.weights.gguf_config import File, has
from engine.runtime.weights.gguf_gemma import gemma3


def bert(file: File) -> dict[str, Any]:
    """BERT, and RoBERTa and XLM-R, whose positions the converter cuts to those that are used."""
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
    return {**gemma3(file), "use_bidirectional_attention": True}


def behind_pooling(file: File) -> dict[str, Any]:
    """Return what a file has behind pooling: a classifier's head, or dense modules; each part's sizes and whether it has a bias."""
    parts = {
        name: (*file.shapes[f"{name}.weight"], f"{name}.bias" in file.shapes)
        for name in ("dense_2", "dense_3", "cls", "cls.norm", "cls.output")
        if f"{name}.weight" in file.shapes
    }
    if "cls" not in parts and "cls.output" not in parts:
        return {"parts_behind": parts} if parts else {}
    if "cls.output" not in parts:
        raise ModelLoadError(f"{file.meta.source} has no tensor 'cls.output.weight', which scores labels.")
    num, meta = parts["cls.output"][0], file.meta
    labels = meta.texts("classifier.output_labels") if meta.has("classifier.output_labels") else ()
    found: dict[str, Any] = {"parts_behind": parts, "architectures": ["ForSequenceClassification"], "num_labels": num}
    if labels == ("yes", "no"):  # Qwen3-Reranker, whose rows of the head these are
        return found | {"classifier_from_token": labels[::-1], "is_original_qwen3_reranker": True}
    if len(labels) == num:
        found["id2label"] = dict(enumerate(labels))
    is_mean = meta.integer("classifier.pooling_type", 0) == 1
    return found | ({"classifier_pooling": "mean"} if is_mean else {})
