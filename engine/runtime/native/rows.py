"""Rows of a matrix as a weight file has them: what readers give and products take. Imports no torch."""

from __future__ import annotations

import os
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from engine.core.errors import ModelLoadError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class OpenFile:
    """A file that is open for reading as long as this object lives."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        self.number = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def read(self, begin: int, room: memoryview) -> None:
        """Fill a room with the bytes from `begin` on. Raises ModelLoadError; a map of a file that is cut ends the process."""
        done = 0
        while done < len(room):
            got = os.preadv(self.number, [room[done:]], begin + done)
            if got == 0:
                raise ModelLoadError(f"{self.path} became shorter while it was being loaded; start again.")
            done += got

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
    factor: float = 1.0  # of all numbers; NVFP4's second scale

    @property
    def num_rows(self) -> int:
        """Return how many rows there are."""
        return len(self.rows)


class CodeLayout(IntEnum):
    """How codes lie in rows, as in quire_cpu.h."""

    NIBBLES = 0  # [rows, inputs / 2], the low half is the even input
    BYTES = 1
    FP8 = 2
    MXFP4 = 3  # as nibbles


class RepackedRows(NamedTuple):
    """Rows of a GGUF type that are made while they are packed, of codes in a file and of scales in memory."""

    kind: int
    num_rows: int
    row_bytes: int
    num_inputs: int
    layout: CodeLayout
    codes: StoredRows
    num_groups: int
    scales: Tensor  # [num_rows / scale_rows, groups]: float16, exponents of MXFP4, float32 of FP8
    minimums: Tensor | None  # float16, as scales
    shifts: Tensor | None  # int8, as scales; None: `shift` for all
    shift: int
    group: int  # inputs that share a scale
    scale_rows: int  # rows that share one
    head_rows: int = 0  # of StoredRows

    @property
    def file(self) -> OpenFile | None:
        """Return the file of the codes."""
        return self.codes.file

    @property
    def has_one_scale(self) -> bool:
        """Return whether a row of bytes has one scale."""
        return self.layout is CodeLayout.BYTES and self.num_groups == 1


def in_halves(rows: np.ndarray, head_rows: int) -> np.ndarray:
    """Return a copy of rows whose heads are stored in pairs, in the order 0, 1, 2 and so on."""
    if head_rows == 0:
        return rows
    pairs = rows.reshape(-1, head_rows // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
