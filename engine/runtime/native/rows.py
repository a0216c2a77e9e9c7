"""Rows of a matrix as a weight file has them: what readers give and products take. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np


class OpenFile:
    """A file that is open for reading as long as this object lives."""

    __slots__ = ("number", "path")

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        self.number = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


class StoredRows(NamedTuple):
    """Rows of a matrix as in a file, [rows, bytes of a row]; `kind` is GGUF's type, also of floats.

    `file` and `offset` say where they are; read from there, they take no memory. Without a file they are in memory only.
    """

    kind: int
    rows: np.ndarray
    file: OpenFile | None = None
    offset: int = 0
    head_rows: int = 0  # not 0: the rows of a head are stored in pairs (0, d / 2), (1, d / 2 + 1) and so on


def in_halves(rows: np.ndarray, head_rows: int) -> np.ndarray:
    """Return a copy of rows whose heads are stored in pairs, in the order 0, 1, 2 and so on."""
    if head_rows == 0:
        return rows
    pairs = rows.reshape(-1, head_rows // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
