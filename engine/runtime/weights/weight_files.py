"""Finds the safetensors files of a model folder, and reads its JSON files, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine import regular_file
from engine.core.errors import ModelLoadError
from engine.regular_file import check_regular, reason

INDEX = "model.safetensors.index.json"
_MAX_BYTES = 64 << 20  # the index of the largest checkpoints takes 10 MB


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a checkpoint. Raises ModelLoadError."""
    missing = f"{path.parent} has no {path.name}; name a folder that holds a model."
    return regular_file.read_object(path, _MAX_BYTES, ModelLoadError, missing)


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
