"""Reads the tensors of a GGUF file as rows of a memory map, after checking its header."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.core.errors import ModelLoadError
from engine.gguf_header import TensorInfo, read_header


class GGUFTensor(NamedTuple):
    """One tensor: `rows` [rows, bytes of a row] is a view; `shape` is outermost first."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    rows: np.ndarray


class GGUFFile(NamedTuple):
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Return header and tensors. Raises ModelLoadError for an incomplete file."""
    header = read_header(path)
    data = np.memmap(path, np.uint8, "r").view(np.ndarray)
    try:
        return GGUFFile(header.metadata, {info.name: _tensor(data, info) for info in header.tensors})
    except ValueError as error:
        raise ModelLoadError(f"The model file {path} is truncated or damaged ({error}); download it again.") from None


def _tensor(data: np.ndarray, info: TensorInfo) -> GGUFTensor:
    kind = GGMLQuantizationType(info.kind)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if not info.shape or 0 in info.shape or info.shape[-1] % block:
        raise ValueError(f"tensor {info.name!r} has the impossible shape {list(info.shape)} for {kind.name}")
    num_rows, row_bytes = math.prod(info.shape[:-1]), info.shape[-1] // block * block_bytes
    end = info.start + num_rows * row_bytes
    if end > len(data):
        raise ValueError(f"it ends at byte {len(data)}, inside tensor {info.name!r}")
    return GGUFTensor(info.name, info.shape, kind, data[info.start : end].reshape(num_rows, row_bytes))
