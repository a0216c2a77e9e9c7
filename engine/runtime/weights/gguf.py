"""Reads GGUF files: memory-mapped, with Hugging Face's names.

A copied tensor is dequantised. Three things differ by architecture: the names of tensors (weights/gguf_names.py), whether
the rows of Q and K are in the order of interleaved rotation, and whether norms are stored as 1 + weight. Decays of recurrent
layers are stored as -exp(A_log), and Mamba-2's vectors as matrices.
weights/gguf_config.py turns the metadata into a config.json.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from engine.core.errors import ModelLoadError
from engine.files.gguf_header import TensorInfo, read_parts
from engine.files.gguf_kinds import Kind
from engine.files.hf_config import HFConfig
from engine.runtime.native.rows import OpenFile, StoredRows, in_halves
from engine.runtime.weights.checkpoint import Checkpoint, StoredTensor
from engine.runtime.weights.expert_names import names_of, num_read_layers
from engine.runtime.weights.gguf_config import hf_config
from engine.runtime.weights.gguf_names import parts_of

if TYPE_CHECKING:
    from torch import Tensor

    from engine.runtime.native.library import Library

_FLOATS = (Kind.F32, Kind.F16, Kind.BF16)
_REMOVED = (4, 5, 31, 32, 33, 36, 37, 38)  # by ggml: Q4_2, Q4_3, and rows of Q4_0 and IQ4_NL that are interleaved
# Elements dequantised at a time without the native library. They stay in the cache, and torch converts so few without
# waking its threads, which wait for each other on a busy machine (the default model: 0.6 s; chunks of 2^20 took 1.6 s).
_CHUNK = 1 << 15
_READ_BYTES = 1 << 24  # at a time
_NATIVE_CHUNK = 1 << 24  # with it, for a device with separate memory

_INTERLEAVED = (
    "llama",
    "mistral3",
    "granite",
    "granitemoe",
    "granitehybrid",
    "granite_swa",
    "smollm3",
)  # llama.cpp rotates neighbours (0, 1), transformers halves (0, d / 2)
_OFFSET_NORMS = ("gemma", "gemma2", "gemma3", "gemma-embedding", "qwen35", "qwen35moe", "qwen3next")
_VECTORS = (".ssm_a", ".ssm_d", ".ssm_norm.weight")  # which files of Mamba-2 have as [heads, 1] or [groups, width]
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # in the config instead


class GGUFTensor(NamedTuple):
    """One tensor: `rows` [rows, bytes of a row] is a view of the file at `start`; `shape` is outermost first."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    rows: np.ndarray
    file: OpenFile
    start: int
    factor: float = 1.0  # of its numbers

    @property
    def path(self) -> str:
        """Return the file's path, for errors."""
        return str(self.file.path)

    def stored(self, head_rows: int) -> StoredRows:
        """Return the rows and where they are."""
        return StoredRows(int(self.kind), self.rows, self.file, self.start, head_rows, self.factor)


class GGUFCheckpoint(Checkpoint):
    """One .gguf file, or the parts of a split one by the path of the first."""

    files: Sequence[Path] = ()

    def __init__(self, path: Path, seed: int = 0) -> None:  # noqa: ARG002 - for random weights
        parts = read_parts(path)
        header = parts[path]
        self.files = list(parts)
        self._stored: dict[str, GGUFTensor] = {}
        for part, its_header in parts.items():
            for info in its_header.tensors:
                check_kind(info.name, info.kind, str(part))
            self._stored |= read_tensors(part, its_header.tensors)
        ropes = {name: _values(self._stored[name]) for name in _ROPE_TENSORS if name in self._stored}
        shapes = {name: tensor.shape for name, tensor in self._stored.items()}
        self._arch, values = hf_config(header.metadata, shapes, ropes, str(path))
        self.config = HFConfig(values, str(path))

    @property
    def num_weights(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self._stored.values())

    def held_bytes(self, of_float: int, of_matrix: int | None) -> float:
        return sum(
            math.prod(shape) * (of_float if kind in _FLOATS else of_matrix or kind.packed / kind.block)
            for _, shape, kind, *_ in self._stored.values()
        )

    def tensors(self, wanted: Mapping[str, tuple[int, ...]]) -> Iterator[StoredTensor]:  # noqa: ARG002 - the protocol's
        num_layers = num_read_layers(self.config)
        for name, whole in self._stored.items():
            if name in _ROPE_TENSORS or self._is_second_scale(name):
                continue
            factors = self._factors(whole)
            for part in parts_of(self._arch, name, whole.shape, num_layers):
                first = part.first_row
                rows, start = whole.rows[first : first + part.num_rows], whole.start + first * whole.rows.shape[1]
                factor = factors[first * len(factors) // len(whole.rows)]
                tensor = whole._replace(shape=part.shape, rows=rows, start=start, factor=factor)
                stored = partial(self._stored_rows, tensor) if len(part.shape) > 1 else None
                for each in names_of(self.config, part.name):
                    yield StoredTensor(
                        each,
                        tensor.shape,
                        rows.nbytes,
                        tensor.path,
                        partial(self._copy, tensor),
                        stored,
                        copy_rows=partial(self._copy_rows, tensor),
                        block=tensor.kind.block,
                    )

    def _factors(self, tensor: GGUFTensor) -> list[float]:
        """Return the factor of each of a tensor's matrices, which is NVFP4's second scale if the file has one."""
        name = tensor.name.removesuffix("weight") + "scale"
        return _values(self._stored[name]) if name in self._stored and self._is_second_scale(name) else [1.0]

    def _is_second_scale(self, name: str) -> bool:
        """Return whether a tensor scales weights in NVFP4, or their inputs, as converted checkpoints have it."""
        stem, _, ending = name.rpartition(".")
        weight = self._stored.get(f"{stem}.weight")
        is_gemmas = self._arch == "gemma4" and name.endswith("ffn_down_exps.scale")  # which the model applies itself
        return ending in ("scale", "input_scale") and weight is not None and weight.kind is Kind.NVFP4 and not is_gemmas

    def _copy(self, tensor: GGUFTensor, target: Tensor) -> None:
        self._copy_rows(tensor, self._stored_rows(tensor), target)

    def _copy_rows(self, tensor: GGUFTensor, stored: StoredRows, target: Tensor) -> None:
        """Dequantise some of a tensor's rows."""
        from engine.runtime.native.library import native  # a config is read before torch is imported

        library, matrix = native(), target.view(-1, target.shape[-1])
        if library is not None and tensor.kind not in _FLOATS:
            _dequantise(library, stored, matrix)
        else:
            is_norm = tensor.name.endswith("norm.weight") and not tensor.name.endswith("ssm_norm.weight")
            offset = is_norm and self._arch in _OFFSET_NORMS
            for rows, part in _read(stored, matrix):
                convert(rows, tensor.kind, part, np.float32(offset))
            if stored.factor != 1:
                matrix.mul_(stored.factor)
            if tensor.name.endswith(".ssm_a"):
                target.neg_().log_()

    def _stored_rows(self, tensor: GGUFTensor) -> StoredRows:
        """Return a tensor's rows, with their order if that is not transformers'."""
        role = tensor.name.split(".")[-2]
        if self._arch not in _INTERLEAVED or role not in ("attn_q", "attn_k"):
            return tensor.stored(0)
        heads = self.config.size("num_attention_heads" if role == "attn_q" else "num_key_value_heads")
        outputs = tensor.shape[0]  # rows of a weight, elements of a bias
        if outputs % (2 * heads):
            raise ModelLoadError(
                f"{tensor.path}: tensor {tensor.name!r} has {outputs} outputs, which {heads} heads cannot share."
            )
        if len(tensor.shape) == 1:  # a bias is one row in the file
            rows = tensor.rows.reshape(outputs, -1)
            return StoredRows(int(tensor.kind), rows, tensor.file, tensor.start, outputs // heads)
        return tensor.stored(outputs // heads)


def header_config(metadata: Mapping[str, Any], tensors: Sequence[TensorInfo], source: str) -> HFConfig | None:
    """Return the config of a file whose header alone is here; None for a part of a split one. Raises ModelLoadError."""
    for tensor in tensors:
        check_kind(tensor.name, tensor.kind, source)
    if metadata.get("split.count", 0) > 1:  # the tensors of the other parts decide, too
        return None
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    ropes = {name: [1.0] * math.prod(shapes[name]) for name in _ROPE_TENSORS if name in shapes}
    return HFConfig(hf_config(metadata, shapes, ropes, source)[1], source)


def check_kind(name: str, kind: int, source: str) -> None:
    """Raise ModelLoadError for a type that is not read."""
    if kind not in Kind._value2member_map_:
        reason = "ggml has removed" if kind in _REMOVED else "is unknown"
        raise ModelLoadError(
            f"{source}: tensor {name!r} is stored as type {kind}, which {reason}; Quire reads {', '.join(Kind.__members__)}."
        )


def _read(stored: StoredRows, target: Tensor) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Yield some rows after others as they are read from the file, and the rows of a matrix that they are for."""
    num, step, head_rows = len(stored.rows), stored.rows.strides[0], stored.head_rows or 1
    most = max(_READ_BYTES // step // head_rows, 1) * head_rows if num == len(target) else num
    for first in range(0, num, most):
        rows = stored.rows[first : first + most]
        if stored.file is not None:
            room = np.empty((len(rows) - 1) * step + rows.shape[1], np.uint8)
            stored.file.read(stored.offset + first * step, room.data)
            rows = np.lib.stride_tricks.as_strided(room, rows.shape, (step, 1))
        part = target[first : first + most] if num == len(target) else target
        yield in_halves(rows, stored.head_rows).reshape(len(part), -1), part


def _dequantise(library: Library, stored: StoredRows, target: Tensor) -> None:
    """Dequantise rows of blocks in C."""
    import torch

    from engine.runtime.native.ops import dequantise

    if target.device.type == "cpu" and target.is_contiguous():
        dequantise(library, stored, target)
        return
    step = max(1, _NATIVE_CHUNK // target.shape[1])
    rows = in_halves(stored.rows, stored.head_rows)
    for some, part in zip(np.split(rows, range(step, len(target), step)), target.split(step), strict=True):
        floats = torch.empty(part.shape, dtype=part.dtype)
        dequantise(library, StoredRows(stored.kind, np.ascontiguousarray(some), factor=stored.factor), floats)
        part.copy_(floats)


def convert(rows: np.ndarray, kind: Kind, target: Tensor, stored_offset: np.float32) -> None:
    """Dequantise rows by numpy, or copy floats; weights are stored plus an offset."""
    import torch
    from torch import from_numpy

    if kind in _FLOATS and stored_offset == 0 and rows.ctypes.data % 4 == 0:
        dtype = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}[kind]
        target.copy_(from_numpy(rows).view(dtype))
        return
    step = max(1, _CHUNK // target.shape[1])
    for start in range(0, target.shape[0], step):
        with np.errstate(all="ignore"):  # damaged weights; the check of the first forward pass finds them
            part = dequantised(rows[start : start + step], kind)
            target[start : start + step].copy_(from_numpy(part - stored_offset))


def _values(tensor: GGUFTensor) -> list[float]:
    with np.errstate(all="ignore"):
        return [float(value) for value in dequantised(tensor.rows, tensor.kind).ravel()]


def dequantised(rows: np.ndarray, kind: Kind) -> np.ndarray:
    """Return rows of blocks as float32, by `gguf`; it lacks two types, whose blocks are a float16 and bits, lowest first."""
    if kind is Kind.F32:
        return rows.view(np.float32)
    if kind not in (Kind.Q1_0, Kind.Q2_0):
        from gguf.quants import GGMLQuantizationType, dequantize

        return dequantize(rows, GGMLQuantizationType(kind))
    blocks = rows.reshape(*rows.shape[:-1], -1, kind.num_bytes)
    bits = np.unpackbits(blocks[..., 2:], axis=-1, bitorder="little").astype(np.float32)
    codes = 2 * bits - 1 if kind is Kind.Q1_0 else bits[..., ::2] + 2 * bits[..., 1::2] - 1
    return (blocks[..., :2].copy().view(np.float16).astype(np.float32) * codes).reshape(*rows.shape[:-1], -1)


def read_tensors(path: Path, infos: Iterable[TensorInfo]) -> dict[str, GGUFTensor]:
    """Return tensors as rows of a memory map. Raises ModelLoadError for a cut file."""
    file = OpenFile(path)
    data = np.memmap(path, np.uint8, "c").view(np.ndarray)
    try:
        return {info.name: _tensor(data, info, file) for info in infos}
    except ValueError as error:
        raise ModelLoadError(f"The model file {path} is truncated or damaged ({error}); download it again.") from None


def _tensor(data: np.ndarray, info: TensorInfo, file: OpenFile) -> GGUFTensor:
    kind = Kind(info.kind)
    if not info.shape or 0 in info.shape or info.shape[-1] % kind.block:
        raise ValueError(f"tensor {info.name!r} has the impossible shape {list(info.shape)} for {kind.name}")
    num_rows, row_bytes = math.prod(info.shape[:-1]), info.shape[-1] // kind.block * kind.num_bytes
    end = info.start + num_rows * row_bytes
    shape = info.shape
    if info.name.endswith(_VECTORS):
        shape, num_rows, row_bytes = (math.prod(shape),), 1, num_rows * row_bytes
    if end > len(data):
        raise ValueError(f"it ends at byte {len(data)}, inside tensor {info.name!r}")
    return GGUFTensor(info.name, shape, kind, data[info.start : end].reshape(num_rows, row_bytes), file, info.start)
