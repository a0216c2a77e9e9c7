"""Rows of a quantised matrix as a GGUF file has them: what readers give and products take. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np


class QuantisedRows(NamedTuple):
    """Rows of a matrix as in a GGUF file, [rows, bytes of a row]; `kind` is GGUF's type."""

    kind: int
    rows: np.ndarray
