"""Reads folders in the hub's layout: config.json, and safetensors in one file or the shards of an index.

Matrices of floats are handed on as rows in the file. Pickled checkpoints (.bin, .pt) are refused, because reading one can
run code.

Tensors are read by system calls, so that their bytes take memory only where they are copied to. Views of a memory map
serve devices with separate memory, and parts that do not lie in one piece. Imports torch only to copy.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.core.errors import ModelLoadError
from engine.files.hf_config import HFConfig
from engine.files.quant_config import BESIDE, QuantConfig, read_quantization
from engine.runtime.native.rows import OpenFile, StoredRows
from engine.runtime.weights.checkpoint import (
    CODES,
    FLOATS,
    TYPES,
    UNUSED,
    Checkpoint,
    Header,
    Headers,
    StoredTensor,
    check_packed,
    dtype_of,
    module_of,
)
from engine.runtime.weights.expert_names import Part, expert_parts
from engine.system import regular_file
from engine.system.regular_file import check_regular, reason

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

_MAX_HEADER = 100 << 20  # bytes
_CHUNK = 1 << 20  # bytes that are converted at a time
_GGUF_KINDS = {"F32": 0, "F16": 1, "BF16": 30}


class Span(NamedTuple):
    """A tensor of a file: its type and shape, and the position of its bytes."""

    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """One file, open for reading, and its tensors by name."""

    def __init__(self, path: Path) -> None:
        """Raises ModelLoadError."""
        try:
            self._file = OpenFile(path)
            self.spans: Mapping[str, Span] = _read_header(self._file.number)
        except (OSError, ValueError, RecursionError) as error:
            raise ModelLoadError(
                f"{path} is truncated or not a safetensors file ({error}); download it again."
            ) from None

    @property
    def path(self) -> Path:
        """Return the file's path."""
        return self._file.path

    @cached_property
    def _map(self) -> np.ndarray:
        import numpy as np  # 30 ms, which `--help` would wait for

        return np.memmap(self.path, np.uint8, "c").view(np.ndarray)

    def rows(self, span: Span, part: Part) -> StoredRows:
        """Return the rows of a part, of any type that is known; `kind` is GGUF's of floats, else -1."""
        assert part.first is not None
        size = TYPES[span.kind][0]
        num_rows, row_bytes = part.shape[0], math.prod(part.shape[1:]) * size
        begin, num_bytes = span.begin + part.first * size, ((num_rows - 1) * part.step + 1) * row_bytes
        rows = self._map[begin : begin + num_bytes].reshape(-1, row_bytes)[:: part.step]
        return StoredRows(_GGUF_KINDS.get(span.kind, -1), rows, self._file, begin)

    def copy(self, span: Span, part: Part, target: Tensor) -> None:
        """Copy a part of a tensor into one of its shape and any type. Raises ModelLoadError if the file was cut."""
        import torch

        size, dtype = TYPES[span.kind][0], dtype_of(span.kind)
        if target.device.type != "cpu" or part.first is None or part.step != 1 or not target.is_contiguous():
            whole = torch.from_numpy(self._map[span.begin : span.end]).view(dtype).view(span.shape)
            target.copy_(part.view(whole))
            return
        self._fill(span.begin + part.first * size, dtype, target)

    def copy_rows(self, kind: str, stored: StoredRows, target: Tensor) -> None:
        """Copy some of the rows of `rows` into a tensor of any type."""
        import torch

        dtype, is_dense = dtype_of(kind), stored.rows.strides[0] == stored.rows.shape[1]
        if is_dense and target.device.type == "cpu" and target.is_contiguous():
            self._fill(stored.offset, dtype, target)
        else:
            target.copy_(torch.from_numpy(stored.rows).view(dtype).reshape(target.shape))

    def _fill(self, begin: int, dtype: torch.dtype, target: Tensor) -> None:
        """Fill a tensor with the numbers from `begin` on."""
        import torch

        flat, size = target.view(-1), dtype.itemsize
        if target.dtype == dtype:
            self._read(begin, flat)
            return
        for first in range(0, len(flat), _CHUNK // size):
            some = flat[first : first + _CHUNK // size]
            stored = torch.empty(len(some), dtype=dtype)
            self._read(begin + first * size, stored)
            some.copy_(stored)

    def _read(self, begin: int, target: Tensor) -> None:
        """Fill a tensor of one dimension with the bytes from `begin` on."""
        import torch

        if target.numel():
            self._file.read(begin, target.view(torch.uint8).numpy().data)


def has_rows(span: Span, part: Part) -> bool:
    """Return whether `SafetensorsFile.rows` serves a part: a matrix, not transposed."""
    return len(part.shape) > 1 and part.first is not None and span.kind in TYPES and math.prod(part.shape) > 0


def _read_header(number: int) -> dict[str, Span]:
    """Return the tensors of an open file. Raises OSError or ValueError."""
    size = os.fstat(number).st_size
    length = int.from_bytes(os.pread(number, 8, 0), "little")
    if length > min(_MAX_HEADER, size - 8):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    entries = json.loads(os.pread(number, length, 8))
    if not isinstance(entries, dict):
        raise ValueError("its header is no JSON object")
    found = {name: _span(name, entry, 8 + length) for name, entry in entries.items() if name != "__metadata__"}
    at = 8 + length
    for name, span in sorted(found.items(), key=lambda item: item[1][2:]):
        if span.begin != at:
            raise ValueError(f"tensor {name!r} does not begin where another one ends")
        at = span.end
    if at != size:
        raise ValueError(f"its tensors end at byte {at}, and the file at byte {size}")
    return found


def _span(name: str, entry: Any, base: int) -> Span:
    """Return a tensor that a header describes. Raises ValueError."""
    try:
        kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"its header lacks type, shape or place of {name!r}") from None
    numbers = [*shape, begin, end] if isinstance(shape, list) else [None]
    is_whole = all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
    if not isinstance(kind, str) or not is_whole or begin > end:
        raise ValueError(f"its header has a wrong type, shape or place of {name!r}")
    if kind in TYPES and math.prod(shape) * TYPES[kind][0] != end - begin:
        raise ValueError(f"tensor {name!r} of shape {shape} in {kind} does not have {end - begin} bytes")
    return Span(kind, tuple(shape), base + begin, base + end)


_INDEX = "model.safetensors.index.json"
_MAX_BYTES = 64 << 20  # the index of the largest checkpoints takes 10 MB
_OTHER_TOWERS = (
    "vision_tower.", "multi_modal_projector.", "visual.", "image_newline", "audio_tower.", "embed_vision.", "embed_audio.",
    "vision_embedder.", "vision_model.", "connector.",
)  # fmt: skip
_BODY = ("embed_tokens.", "layers.", "norm.")
_VOCABULARY = {"d2t": ("I64", "I32"), "t2d": ("BOOL", "U8")}  # of an EAGLE-3 draft, and their types
_MAX_CODES = {"I32": 16, "U8": 2}  # that an element may hold: of 2 bits and of 4


class SafetensorsCheckpoint(Checkpoint):
    """A folder in the hub's layout; its weight files are opened when needed."""

    def __init__(self, folder: Path, seed: int = 0) -> None:  # noqa: ARG002 - for random weights
        self._folder = folder
        self.config = read_config(folder)
        self.quantization: QuantConfig | None = read_quantization(self.config, folder)
        self._headers: dict[str, Header] | None = None
        self._found: tuple[HFConfig, list[StoredTensor]] | None = None  # the tensors by a config

    def check(self) -> None:
        _weight_files(self._folder)
        self.headers()

    @property
    def files(self) -> list[Path]:
        """Return the files of settings, then those of the weights. Raises ModelLoadError."""
        settings = (self._folder / name for name in ("config.json", *BESIDE))
        return [*(path for path in settings if path.exists()), *_weight_files(self._folder)]

    @property
    def is_body(self) -> bool:
        """Return whether the files were saved from a class without a head: by its name, or by those of tensors.

        A causal model without its head is damaged instead.
        """
        names, classes = [name for file in self._files for name in file.spans], self.config.values.get("architectures")
        if any("lm_head." in name for name in names):
            return False
        if any(name.startswith(_BODY) for name in names):
            return True
        named = [str(each) for each in classes] if isinstance(classes, list) else []
        return any(each.endswith("Model") and not each.endswith("LMHeadModel") for each in named)

    @property
    def num_weights(self) -> int:
        return sum(math.prod(tensor.shape) * _MAX_CODES.get(tensor.kind, 1) for tensor in self.tensors({}))

    def held_bytes(self, of_float: int, of_matrix: int | None) -> float:
        spans = [(name, span) for file in self._files for name, span in file.spans.items()]
        return sum(
            math.prod(span.shape)
            * (of_matrix if of_matrix and len(span.shape) > 1 and "embed" not in name else of_float)
            if span.kind in FLOATS
            else span.end - span.begin
            for name, span in spans
        )

    def headers(self) -> Headers:
        if self.quantization is None:
            return {}
        if self._headers is None:
            self._headers = {tensor.name: Header(tensor.kind, tensor.shape) for tensor in self._named()}
            check_packed(self.quantization, self._headers)
        return self._headers

    def tensors(self, wanted: Mapping[str, tuple[int, ...]]) -> Iterator[StoredTensor]:
        headers = self.headers()
        for tensor in self._named():
            if not self._is_left_out(tensor, wanted, headers):
                _require_readable(tensor, is_quantised=self.quantization is not None)
                yield tensor

    def towers(self) -> list[StoredTensor]:
        return [tensor for file in self._files for tensor in read_tensors(file, self.config, of_towers=True)]

    @cached_property
    def _files(self) -> list[SafetensorsFile]:
        return [SafetensorsFile(path) for path in _weight_files(self._folder)]

    def _named(self) -> list[StoredTensor]:
        """Return the tensors of all files by their names in a causal model."""
        if self._found is None or self._found[0] is not self.config:
            self._found = self.config, [tensor for file in self._files for tensor in read_tensors(file, self.config)]
        return self._found[1]

    def _is_left_out(self, tensor: StoredTensor, wanted: Mapping[str, tuple[int, ...]], headers: Headers) -> bool:
        """Return whether no model reads a tensor: GPTQ writes biases of zeros to modules that have none."""
        if self.quantization is None or tensor.name in wanted:
            return False
        if tensor.name.endswith(UNUSED):
            return True
        is_spare = bool(wanted) and tensor.name.endswith(".bias")
        return is_spare and tensor.name.removesuffix(".bias") + ".qweight" in headers and _is_zero(tensor)


def language_name(name: str) -> str | None:
    """Return a tensor's name in a causal model; None for a vision tower's."""
    if name.removeprefix("model.").startswith(_OTHER_TOWERS):
        return None
    # A language model inside another, old and new, and Nemotron's.
    for prefix in ("language_model.model.", "model.language_model.", "model.text_model.", "backbone."):
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    if name.startswith(_BODY):  # a body saved without its head, like embedding models
        return "model." + name
    return name.removeprefix("language_model.")


def read_tensors(file: SafetensorsFile, config: HFConfig, *, of_towers: bool = False) -> Iterator[StoredTensor]:
    """Yield the tensors of a file, of the language model or of the towers; one of the file may be several, or none."""
    path = str(file.path)
    config = HFConfig({}, config.source) if of_towers else config  # which renames those of the language model alone
    for stored_name, span in file.spans.items():
        name = stored_name if of_towers else language_name(stored_name)
        if name is None or (of_towers and language_name(stored_name) is not None):
            continue
        size = TYPES[span.kind][0] if span.kind in TYPES else 0
        for part in expert_parts(config, name, span.shape):
            copy_to = partial(file.copy, span, part)
            rows = partial(file.rows, span, part) if has_rows(span, part) else None
            num_bytes = math.prod(part.shape) * size
            yield StoredTensor(
                part.name, part.shape, num_bytes, path, copy_to, rows, span.kind, partial(file.copy_rows, span.kind)
            )


def _require_readable(tensor: StoredTensor, *, is_quantised: bool) -> None:
    """Raise ModelLoadError for a type that is not read, or not for this tensor."""
    is_part = is_quantised and (module_of(tensor.name) is not None or not tensor.name.endswith((".weight", ".bias")))
    readable = _VOCABULARY.get(tensor.name, (*FLOATS, *CODES) if is_part else FLOATS)
    if tensor.kind not in readable:
        raise ModelLoadError(
            f"{tensor.file}: tensor {tensor.name!r} is stored as {tensor.kind}; Quire reads {', '.join(readable)} in "
            "safetensors."
        )


def _is_zero(tensor: StoredTensor) -> bool:
    import torch

    found = torch.empty(tensor.shape)
    tensor.copy_to(found)
    return not bool(found.any())


def read_config(folder: Path) -> HFConfig:
    """Return the config.json of a folder. Raises ModelLoadError."""
    path = folder / "config.json"
    return HFConfig(_read_object(path), str(path))


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
