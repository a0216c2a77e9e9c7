"""Reads the header of a GGUF file: keys, values and the positions of tensors.

The runtime needs it for weights, the text side for the tokenizer. The gguf package's general reader makes an object of
each of the tokenizer's hundred thousand strings and takes 2.2 s on the default model; this module takes 0.1 s. Every
length is checked against the file before it is used, and against the limits below: a sparse file is as long as it likes.

Of a model that is split into files, PREFIX-00001-of-00003.gguf and so on, the first file has the metadata, and each has some
tensors.
"""

from __future__ import annotations

import mmap
import re
import struct
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.errors import ModelLoadError
from engine.system.regular_file import check_regular, reason

_VERSIONS = (2, 3)  # one layout for little-endian files; version 1 had shorter lengths
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20

# The largest tokenizers have 1.3 million items in 15 MiB, the largest models some thousand tensors.
_MAX_HEADER_BYTES = 128 << 20
_MAX_KEYS = 4096
_MAX_TENSORS = 1 << 17
_MAX_DIMS = 8
_MAX_NAME_BYTES = 1024  # of a key or a tensor
_MAX_TEXT_BYTES = 4 << 20  # of a value
_MAX_ITEMS = 1 << 16  # of a list
_MAX_VOCABULARY_ITEMS = 1 << 22  # of all lists of the tokenizer
_VOCABULARY = "tokenizer."


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
    """Return the header of a file. Raises ModelLoadError for a damaged one.

    It is kept until forget_headers(): a start reads the same one for the config, the weights and the tokenizer.
    """
    try:
        about = path.stat()
    except OSError as error:
        raise ModelLoadError(f"The model file {path} cannot be read: {reason(error)}.") from None
    return _read(path, about.st_mtime_ns, about.st_size)


def forget_headers() -> None:
    """Free the headers that were read: a tokenizer's strings take tens of megabytes."""
    _read.cache_clear()


@cache
def _read(path: Path, _modified_ns: int, _size: int) -> GGUFHeader:
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
        self._size = len(data)
        self._num_items_left = _MAX_VOCABULARY_ITEMS

    def header(self, metadata: dict[str, Any]) -> GGUFHeader:
        """Return the header, its values put into `metadata`. Raises ValueError or struct.error for an invalid one."""
        if self._take(4) != b"GGUF":
            raise ValueError("it does not start with 'GGUF'")
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}; {' and '.join(map(str, _VERSIONS))} are known")
        num_tensors = self._count("Q", _MAX_TENSORS, "tensors")
        for _ in range(self._count("Q", _MAX_KEYS, "keys")):
            name = self._string(_MAX_NAME_BYTES)
            metadata[name] = self._value(name, self._number("I"))
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
        if self._at > min(self._size, _MAX_HEADER_BYTES):
            raise self._ending()
        return self._data[start : self._at]

    def _ending(self) -> ValueError:
        if self._size > _MAX_HEADER_BYTES:
            return ValueError(f"its header has more than {_MAX_HEADER_BYTES >> 20} MiB")
        return ValueError(f"it ends at byte {self._size}, inside its header")

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _count(self, code: str, most: int, what: str) -> int:
        found: int = self._number(code)
        if found > most:
            raise ValueError(f"it names {found} {what}; at most {most} are read")
        return found

    def _string(self, most: int) -> str:
        return self._take(self._count("Q", most, "bytes of a text")).decode("utf-8")

    def _value(self, name: str, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._string(_MAX_TEXT_BYTES)
        if kind != _ARRAY:
            raise ValueError(f"it holds a value of the unknown type {kind}")
        item, count = self._number("I"), self._num_items(name)
        if item == _STRING:
            return self._strings(count)
        if item not in _NUMBERS:
            raise ValueError(f"it holds a list of the unknown type {item}")
        code = f"<{count}{_NUMBERS[item]}"
        return list(struct.unpack(code, self._take(struct.calcsize(code))))

    def _num_items(self, name: str) -> int:
        """Return the length of a list, which only tokenizers have long."""
        if not name.startswith(_VOCABULARY):
            return self._count("Q", _MAX_ITEMS, f"items of {name}")
        found = self._count("Q", self._num_items_left, f"more items in {name}")
        self._num_items_left -= found
        return found

    def _strings(self, count: int) -> list[str]:
        """Return a list of strings; a tokenizer's are a hundred thousand."""
        read, data, at, found = _LENGTH.unpack_from, self._data, self._at, []
        end = min(self._size, _MAX_HEADER_BYTES)
        for _ in range(count):
            (length,) = read(data, at)  # raises struct.error behind the end
            start, at = at + 8, at + 8 + length
            if at > end:
                raise self._ending()
            found.append(data[start:at].decode("utf-8"))
        self._at = at
        return found

    def _info(self) -> TensorInfo:
        name, num_dims = self._string(_MAX_NAME_BYTES), self._count("I", _MAX_DIMS, "dimensions of a tensor")
        shape = struct.unpack(f"<{num_dims}Q", self._take(8 * num_dims))
        return TensorInfo(name, shape[::-1], self._number("I"), self._number("Q"))


_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def stem(path: Path) -> str:
    """Return a file's name without its ending, and without the number of the part."""
    name = _NAME.fullmatch(path.name)
    return path.stem if name is None else name[1]


def part_paths(path: Path) -> list[Path]:
    """Return the files of a model that exist, by their names: the parts of a split one, else the file itself."""
    parts = [path.with_name(name) for name in part_names(path.name)]
    return parts[:1] if len(parts) == 1 else [each for each in parts if each.exists()]


def part_names(name: str) -> list[str]:
    """Return the names of all parts of a split file, the first part's first; another file is its only part."""
    split = _NAME.fullmatch(name)
    return [name] if split is None else [_part(split[1], index, int(split[3])) for index in range(int(split[3]))]


def read_parts(path: Path) -> dict[Path, GGUFHeader]:
    """Return the headers of all parts by their paths, the first part's first. Raises ModelLoadError.

    A file that is not split is its only part.
    """
    header = read_header(path)
    count = header.metadata.get("split.count", 0)
    if type(count) is not int or count <= 1:
        return {path: header}
    number = header.metadata.get("split.no")
    name = _NAME.fullmatch(path.name)
    if name is None or int(name[3]) != count or number != int(name[2]) - 1:
        raise ModelLoadError(
            f"{path} is one of {count} parts of a model but is not named as such; parts are named "
            f"NAME-00001-of-{count:05}.gguf and so on."
        )
    if number != 0:
        raise ModelLoadError(f"{path} is a part of a split model; name the first part, {_part(name[1], 0, count)}.")
    paths = [path.with_name(each) for each in part_names(path.name)]
    missing = [each.name for each in paths if not each.exists()]
    if missing:
        raise ModelLoadError(
            f"{path} has {count} parts, and {', '.join(missing[:3])}{' and others' if len(missing) > 3 else ''} "
            f"{'is' if len(missing) == 1 else 'are'} missing; download all parts into one folder."
        )
    parts = {path: header} | {each: read_header(each) for each in paths[1:]}
    _check(parts, count)
    return parts


def _check(parts: dict[Path, GGUFHeader], count: int) -> None:
    """Raise ModelLoadError unless the parts belong together."""
    names: set[str] = set()
    for index, (path, header) in enumerate(parts.items()):
        if (header.metadata.get("split.count"), header.metadata.get("split.no")) != (count, index):
            raise ModelLoadError(f"{path} is not part {index + 1} of {count}; download it again.")
        for tensor in header.tensors:
            if tensor.name in names:
                raise ModelLoadError(f"{path} has tensor {tensor.name!r}, which an earlier part has too.")
            names.add(tensor.name)
    first = next(iter(parts))
    total = parts[first].metadata.get("split.tensors.count", len(names))
    if total != len(names):
        raise ModelLoadError(
            f"{first} names {total} tensors, but its {count} parts hold {len(names)}; download the parts again."
        )


def _part(prefix: str, index: int, count: int) -> str:
    return f"{prefix}-{index + 1:05}-of-{count:05}.gguf"
