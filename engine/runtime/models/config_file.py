"""Reads config.json of a model folder, without torch.

A Gemma 3 checkpoint with vision holds the text model's settings under `text_config`; they replace the whole config,
because the text model is served alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.runtime.models.families import FAMILIES
from engine.runtime.models.servable import refuse_unservable
from engine.runtime.weights.weight_files import read_object

# The sizes that Gemma 3's published checkpoints with vision leave out, as transformers' Gemma3TextConfig has them.
_GEMMA3 = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}


def read_model_config(folder: Path) -> dict[str, Any]:
    """Return the language model's settings. Raises ModelLoadError for unservable kinds, too."""
    values = read_object(folder / "config.json")
    refuse_unservable(values, str(folder / "config.json"))
    text = values.get("text_config")
    if values.get("model_type") != "gemma3" or not isinstance(text, Mapping):
        return values
    stored = {key: values[key] for key in ("dtype", "torch_dtype") if values.get(key)}
    return {**_GEMMA3, **stored, **text, "model_type": "gemma3_text"}


def is_native(config: EngineConfig, path: Path) -> bool:
    """Return whether Quire's decoder runs the model, instead of transformers' code."""
    if config.model_impl != "auto":
        return config.model_impl == "quire"
    return path.suffix == ".gguf" or read_model_config(path).get("model_type") in FAMILIES
