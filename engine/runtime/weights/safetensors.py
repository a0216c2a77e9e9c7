"""Checkpoints in safetensors: one file, or shards named by an index. Memory-mapped, copied tensor by tensor.

Pickled checkpoints (.bin, .pt) are refused: reading one runs code that came with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.core.errors import ModelLoadError
from engine.runtime.weights.checkpoint import StoredTensor

_INDEX = "model.safetensors.index.json"
_ELEMENT_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8}


class SafetensorsCheckpoint:
    """A folder in the layout of the Hugging Face hub. Its weights are looked for when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.source = str(folder / "config.json")
        self.config: Mapping[str, Any] = read_json(folder / "config.json")

    def tensors(self) -> Iterator[StoredTensor]:
        for path in _shards(self._folder):
            yield from _stored(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelLoadError(f"{path.parent} has no {path.name}; name a folder that holds a model.") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, and holds a {type(values).__name__}.")
    return values


def _shards(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / _INDEX
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelLoadError(f"{index} has no 'weight_map' that says which file holds which tensor.")
        # An index may name files only beside itself, whatever a hostile one says.
        files = [folder / Path(str(name)).name for name in sorted(set(weight_map.values()))]
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
            raise ModelLoadError(f"{path} is missing, though {_INDEX} names it; download the model again.")
    return files


def _stored(path: Path) -> Iterator[StoredTensor]:
    try:
        file = safe_open(path, framework="pt", device="cpu")
        names = file.keys()
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is truncated or not a safetensors file ({error}); download it again.") from None
    for name in names:
        view = file.get_slice(name)
        shape, kind = tuple(view.get_shape()), view.get_dtype()
        if kind not in _ELEMENT_BYTES:
            raise ModelLoadError(
                f"{path}: tensor {name!r} is stored as {kind}; Quire reads {', '.join(_ELEMENT_BYTES)} in safetensors."
            )
        yield StoredTensor(name, shape, math.prod(shape) * _ELEMENT_BYTES[kind], str(path), partial(_copy, file, name))


def _copy(file: Any, name: str, target: Tensor) -> None:
    target.copy_(file.get_tensor(name))  # a view of the map, converted and moved in one copy
