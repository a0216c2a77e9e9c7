"""The key-value header of a GGUF file, and nothing of its tensors.

Read by hand because it takes sixty lines, and the tokenizer's hundred thousand strings then take a tenth of a second, against
two and a half with the general reader. A truncated or damaged header is a ModelLoadError.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from engine.core.errors import ModelLoadError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # one layout for little-endian files; version 1 had shorter lengths
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read_metadata(path: Path) -> dict[str, Any]:
    """All keys with their values: numbers, strings, and lists of either. Raises ModelLoadError."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()
    except OSError as error:
        raise ModelLoadError(f"The model file {path} cannot be read: {error.strerror}.") from error
    except (ValueError, struct.error) as error:  # an empty file cannot be mapped: a ValueError too
        raise ModelLoadError(f"The model file {path} is not a whole GGUF file: {error}.") from error


class _Reader:
    """Walks the header once; every read checks that the file is long enough."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def header(self) -> dict[str, Any]:
        if self._take(4) != _MAGIC:
            raise ValueError("it does not start with 'GGUF'")
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, of which only {_VERSIONS} are known")
        self._number("Q")  # tensors
        return {self._string(): self._value(self._number("I")) for _ in range(self._number("Q"))}

    def _take(self, size: int) -> bytes:
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise ValueError(f"it ends at byte {len(self._data)}, inside its header")
        return self._data[start : self._at]

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        return self._take(self._number("Q")).decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._number("I"), self._number("Q")
            if item in _NUMBERS:
                code = f"<{count}{_NUMBERS[item]}"
                return list(struct.unpack(code, self._take(struct.calcsize(code))))
            if item == _STRING:
                return [self._string() for _ in range(count)]
            raise ValueError(f"it holds a list of the unknown type {item}")
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        raise ValueError(f"it holds a value of the unknown type {kind}")
