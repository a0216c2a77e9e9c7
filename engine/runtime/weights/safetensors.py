"""Reads folders in the hub's layout: config.json, and safetensors in one file or the shards of an index.

Weights are memory-mapped. Pickled checkpoints (.bin, .pt) are refused, because reading one can run code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from engine import regular_file
from engine.core.errors import ModelLoadError
from engine.regular_file import check_regular, reason
from engine.runtime.weights.checkpoint import StoredTensor
from engine.runtime.weights.expert_names import Part, expert_parts
from engine.runtime.weights.hf_config import HFConfig

if TYPE_CHECKING:
    from torch import Tensor

_INDEX = "model.safetensors.index.json"
_MAX_BYTES = 64 << 20  # the index of the largest checkpoints takes 10 MB
_OTHER_TOWERS = ("vision_tower.", "multi_modal_projector.")
_BODY = ("embed_tokens.", "layers.", "norm.")
_ELEMENT_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8}


class SafetensorsCheckpoint:
    """A folder in the hub's layout; its weight files are opened when needed."""

    def __init__(self, folder: Path, seed: int = 0) -> None:  # noqa: ARG002 - for random weights
        path = folder / "config.json"
        self._folder = folder
        self.config = HFConfig(_read_object(path), str(path))

    def check(self) -> None:
        """Raise ModelLoadError for missing or unreadable weights."""
        _weight_files(self._folder)

    @property
    def num_weights(self) -> int:
        """Return how many elements the files hold."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors({}))

    def tensors(self, wanted: Mapping[str, tuple[int, ...]]) -> Iterator[StoredTensor]:  # noqa: ARG002 - the protocol's
        for path in _weight_files(self._folder):
            yield from _stored(path, self.config)


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


def _stored(path: Path, config: HFConfig) -> Iterator[StoredTensor]:
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
        for part in expert_parts(config, name, shape):
            num_bytes = math.prod(part.shape) * _ELEMENT_BYTES[kind]
            yield StoredTensor(part.name, part.shape, num_bytes, str(path), partial(_copy, file, stored_name, part))


def _copy(file: Any, name: str, part: Part, target: Tensor) -> None:
    target.copy_(part.view(file.get_tensor(name)))  # a view of the map, converted and moved in one copy


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a checkpoint. Raises ModelLoadError."""
    missing = f"{path.parent} has no {path.name}; name a folder that holds a model."
    return regular_file.read_object(path, _MAX_BYTES, ModelLoadError, missing)


def _weight_files(folder: Path) -> list[Path]:
    """Return a checkpoint's safetensors files, one or shards. Raises ModelLoadError."""
    single, index = folder / "model.safetensors", folder / _INDEX
    if index.exists():
        files = [folder / name for name in shard_names(index)]
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
        try:
            check_regular(path)
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {reason(error)}.") from None
    return files


def shard_names(index: Path) -> list[str]:
    """Return the files that an index names. Raises ModelLoadError."""
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} has no 'weight_map' that says which file holds which tensor.")
    names = sorted({name if isinstance(name, str) else repr(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors") or "\0" in name:
            raise ModelLoadError(
                f"{index} names the file {name!r:.200}; the weights must be .safetensors files beside it."
            )
    return names
