"""Writes a safetensors file with one tensor in memory at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

_BYTES = {"BF16": 2, "F32": 4, "I8": 1}


class Entry(NamedTuple):
    """A tensor; `make` returns the bits of its elements, when they are written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], NDArray[Any]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _BYTES[self.dtype]


def write_safetensors(path: Path, entries: Sequence[Entry]) -> None:
    """Write the header's length, the header as JSON, then the tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.nbytes
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            values = entry.make()
            assert (values.nbytes, values.shape) == (entry.nbytes, entry.shape), entry.name
            file.write(values.tobytes())
