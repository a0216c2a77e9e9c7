"""Reads config.json and the names of weight files of a model folder, without torch.

A Gemma 3 checkpoint with vision holds the text model's settings under `text_config`; they replace the whole config, because
the text model is served alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.core.errors import ModelLoadError
from engine.regular_file import check_regular, read_json, reason
from engine.runtime.models.families import FAMILIES
from engine.runtime.models.servable import refuse_unservable

INDEX = "model.safetensors.index.json"
_MAX_BYTES = 64 << 20  # the index of the largest checkpoints takes 10 MB
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


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a checkpoint. Raises ModelLoadError."""
    try:
        values = read_json(path, _MAX_BYTES)
    except FileNotFoundError:
        raise ModelLoadError(f"{path.parent} has no {path.name}; name a folder that holds a model.") from None
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {reason(error)}.") from None
    except ValueError as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, and holds a {type(values).__name__}.")
    return values


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


def weight_files(folder: Path) -> list[Path]:
    """Return a checkpoint's safetensors files, one or shards. Raises ModelLoadError."""
    single, index = folder / "model.safetensors", folder / INDEX
    if index.exists():
        files = [folder / name for name in _shard_names(index)]
    else:
        files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        if pickled:
            raise ModelLoadError(
                f"{folder} holds only pickled weights ({pickled[0]}), which can run code when read; "
                "convert them to safetensors."
            )
        raise ModelLoadError(f"{folder} holds no .safetensors file.")
    for path in files:
        if not path.exists():
            raise ModelLoadError(f"{path} is missing, though {INDEX} names it; download the model again.")
        try:
            check_regular(path)
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {reason(error)}.") from None
    return files


def _shard_names(index: Path) -> list[str]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} has no 'weight_map' that says which file holds which tensor.")
    names = sorted({name if isinstance(name, str) else repr(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors") or "\0" in name:
            raise ModelLoadError(
                f"{index} names the file {name!r:.200}; the weights must be .safetensors files beside it."
            )
    return names
