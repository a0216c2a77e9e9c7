"""Reads safetensors checkpoints: one file, or the shards of an index, memory-mapped.

Pickled checkpoints (.bin, .pt) are refused, because reading one can run code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.core.errors import ModelLoadError
from engine.runtime.weights.checkpoint import StoredTensor
from engine.runtime.weights.weight_files import weight_files

_OTHER_TOWERS = ("vision_tower.", "multi_modal_projector.")
_BODY = ("embed_tokens.", "layers.", "norm.")
_ELEMENT_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8}


class SafetensorsCheckpoint:
    """A folder in the hub's layout; its weight files are opened when needed."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder = folder
        self.source = str(folder / "config.json")
        self.config = config

    def tensors(self) -> Iterator[StoredTensor]:
        for path in weight_files(self._folder):
            yield from _stored(path)


def _language_name(name: str) -> str | None:
    """Return a tensor's name in a causal model; None for a vision tower's."""
    if name.removeprefix("model.").startswith(_OTHER_TOWERS):
        return None
    for prefix in ("language_model.model.", "model.language_model."):  # a language model inside another, old and new
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    if name.startswith(_BODY):  # a body saved without its head, like embedding models
        return "model." + name
    return name.removeprefix("language_model.")


def _stored(path: Path) -> Iterator[StoredTensor]:
    try:
        file = safe_open(path, framework="pt", device="cpu")
        names = file.keys()
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is truncated or not a safetensors file ({error}); download it again.") from None
    for stored_name in names:
        name = _language_name(stored_name)
        if name is None:
            continue
        view = file.get_slice(stored_name)
        shape, kind = tuple(view.get_shape()), view.get_dtype()
        if kind not in _ELEMENT_BYTES:
            raise ModelLoadError(
                f"{path}: tensor {name!r} is stored as {kind}; Quire reads {', '.join(_ELEMENT_BYTES)} in safetensors."
            )
        yield StoredTensor(
            name, shape, math.prod(shape) * _ELEMENT_BYTES[kind], str(path), partial(_copy, file, stored_name)
        )


def _copy(file: Any, name: str, target: Tensor) -> None:
    target.copy_(file.get_tensor(name))  # a view of the map, converted and moved in one copy
