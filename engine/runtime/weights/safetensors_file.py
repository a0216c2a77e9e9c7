"""Reads a safetensors file: its header, and its tensors by position.

Tensors are read by system calls, so that their bytes take memory only where they are copied to. Views of a memory map
serve devices with separate memory, and parts that do not lie in one piece. Imports torch only to copy.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.core.errors import ModelLoadError
from engine.runtime.native.rows import OpenFile, StoredRows
from engine.runtime.weights.expert_names import Part
from engine.runtime.weights.headers import TYPES, dtype_of

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

        if not target.numel():
            return
        room, done = target.view(torch.uint8).numpy().data, 0
        while done < len(room):
            got = os.preadv(self._file.number, [room[done:]], begin + done)
            if got == 0:
                raise ModelLoadError(f"{self.path} became shorter while it was being loaded; start again.")
            done += got


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
