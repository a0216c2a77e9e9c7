"""Reads the header of a GGUF file: keys, values and the positions of tensors.

The runtime needs it for weights, the text side for the tokenizer. The gguf package's general reader makes an object of
each of the tokenizer's hundred thousand strings and takes 2.2 s on the default model; this module takes 0.1 s. Every
length is checked against the file before it is used.
"""

from __future__ import annotations

import mmap
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.errors import ModelLoadError
from engine.regular_file import check_regular, reason

_VERSIONS = (2, 3)  # one layout for little-endian files; version 1 had shorter lengths
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20


class TensorInfo(NamedTuple):
    """A tensor: shape as in torch, GGML's number of the block format, file offset."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int


class GGUFHeader(NamedTuple):
    """Values are numbers, strings, or lists of either."""

    metadata: dict[str, Any]
    tensors: list[TensorInfo]


def read_header(path: Path) -> GGUFHeader:
    """Return the header of a file. Raises ModelLoadError for a damaged one."""
    try:
        check_regular(path)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header({})
    except OSError as error:
        raise ModelLoadError(f"The model file {path} cannot be read: {reason(error)}.") from None
    except (ValueError, struct.error) as error:  # ValueError also for an empty file, which cannot be mapped
        raise ModelLoadError(
            f"The model file {path} is truncated or not a GGUF file ({error}); download it again."
        ) from None


def read_beginning(data: bytes) -> tuple[dict[str, Any], list[TensorInfo] | None]:
    """Return the keys and values that the first bytes of a file hold, and its tensors if they hold the whole header.

    No keys and values if it is no GGUF file.
    """
    found: dict[str, Any] = {}
    with suppress(ValueError, struct.error):  # the rest is not there
        return found, _Reader(data).header(found).tensors
    return found, None


class _Reader:
    """Reads the header once, from the first byte."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data = data
        self._at = 0

    def header(self, metadata: dict[str, Any]) -> GGUFHeader:
        """Return the header, its values put into `metadata`. Raises ValueError or struct.error for an invalid one."""
        if self._take(4) != b"GGUF":
            raise ValueError("it does not start with 'GGUF'")
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}; {' and '.join(map(str, _VERSIONS))} are known")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        for _ in range(num_keys):
            name = self._string()
            metadata[name] = self._value(self._number("I"))
        infos = [self._info() for _ in range(num_tensors)]
        if len({info.name for info in infos}) != num_tensors:
            raise ValueError("it holds two tensors of one name")
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT:
            raise ValueError(f"its general.alignment is {alignment!r:.80}; it must be from 1 to {_MAX_ALIGNMENT}")
        start = -(-self._at // alignment) * alignment
        return GGUFHeader(metadata, [info._replace(start=start + info.start) for info in infos])

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
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"it holds a value of the unknown type {kind}")
        item, count = self._number("I"), self._number("Q")
        if item == _STRING:
            return self._strings(count)
        if item not in _NUMBERS:
            raise ValueError(f"it holds a list of the unknown type {item}")
        code = f"<{count}{_NUMBERS[item]}"
        return list(struct.unpack(code, self._take(struct.calcsize(code))))

    def _strings(self, count: int) -> list[str]:
        """Return a list of strings; a tokenizer's are a hundred thousand."""
        read, data, at, found = _LENGTH.unpack_from, self._data, self._at, []
        for _ in range(count):
            (length,) = read(data, at)  # raises struct.error behind the end
            text, at = data[at + 8 : at + 8 + length], at + 8 + length
            found.append(text.decode("utf-8"))
        self._at = at
        self._take(0)  # raises ValueError if the last one is cut off
        return found

    def _info(self) -> TensorInfo:
        name, num_dims = self._string(), self._number("I")
        shape = struct.unpack(f"<{num_dims}Q", self._take(8 * num_dims))
        return TensorInfo(name, shape[::-1], self._number("I"), self._number("Q"))
