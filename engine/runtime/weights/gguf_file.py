"""The bytes of a GGUF file: metadata, and tensors as rows of a memory map.

Read by hand, because the gguf package's reader makes objects of the tokenizer's hundred thousand strings, which no
weight needs: 2.2 s against 0.1 s on the default model. Every length is checked against the file before it is believed.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.core.errors import ModelLoadError

_VERSIONS = (2, 3)
_UNREAD = "tokenizer."  # keys whose values are passed over
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class GGUFTensor(NamedTuple):
    """`rows` [rows, bytes of a row] is a view of the file; `shape` is outermost first, as torch has it."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    rows: np.ndarray


class GGUFFile(NamedTuple):
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Everything but the tokenizer. Raises ModelLoadError for a file that is not whole."""
    try:
        data = np.memmap(path, np.uint8, "r").view(np.ndarray)
        return _Reader(data).file()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, struct.error) as error:
        raise ModelLoadError(f"{path} is truncated or not a GGUF file ({error}); download it again.") from None


class _Reader:
    """Walks the header once, from the first byte."""

    def __init__(self, data: np.ndarray) -> None:
        self._data = data
        self._bytes = data.data  # a memoryview, for it is cheaper to slice than an array
        self._at = 0

    def file(self) -> GGUFFile:
        if bytes(self._take(4)) != b"GGUF":
            raise ValueError("it does not start with 'GGUF'")
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}; {' and '.join(map(str, _VERSIONS))} are known")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        metadata = {}
        for _ in range(num_keys):
            key = self._string()
            value = self._value(self._number("I"), keep=not key.startswith(_UNREAD))
            metadata[key] = value
        infos = [self._info() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment") or 32)
        start = -(-self._at // alignment) * alignment
        tensors = {info[0]: self._tensor(start, *info) for info in infos}
        if len(tensors) != num_tensors:
            raise ValueError("it holds two tensors of one name")
        return GGUFFile(metadata, tensors)

    def _take(self, size: int) -> memoryview:
        start, self._at = self._at, self._at + size
        if self._at > len(self._bytes):
            raise ValueError(f"it ends at byte {len(self._bytes)}, inside its header")
        return self._bytes[start : self._at]

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        return str(self._take(self._number("Q")), "utf-8")

    def _value(self, kind: int, *, keep: bool) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"it holds a value of the unknown type {kind}")
        item, count = self._number("I"), self._number("Q")
        if item in _NUMBERS:
            code = f"<{count}{_NUMBERS[item]}"
            return list(struct.unpack(code, self._take(struct.calcsize(code))))
        if keep or item != _STRING:
            return [self._value(item, keep=keep) for _ in range(count)]
        for _ in range(count):
            self._take(self._number("Q"))
        return None

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        """A tensor's name, shape, kind and offset."""
        name, num_dims = self._string(), self._number("I")
        shape = struct.unpack(f"<{num_dims}Q", self._take(8 * num_dims))
        return name, shape[::-1], self._number("I"), self._number("Q")

    def _tensor(self, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
        quantisation = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[quantisation]
        if not shape or 0 in shape or shape[-1] % block:
            raise ValueError(f"tensor {name!r} has the impossible shape {list(shape)} for {quantisation.name}")
        num_rows, row_bytes = math.prod(shape[:-1]), shape[-1] // block * block_bytes
        begin, end = start + offset, start + offset + num_rows * row_bytes
        if end > len(self._data):
            raise ValueError(f"it ends at byte {len(self._data)}, inside tensor {name!r}")
        return GGUFTensor(name, shape, quantisation, self._data[begin:end].reshape(num_rows, row_bytes))
