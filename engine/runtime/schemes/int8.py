"""Weights quantised to int8 at load, with a scale for each row, multiplied by a CPU's native library."""

from __future__ import annotations

from engine.runtime.native.library import WeightFormat, native
from engine.runtime.native.ops import FLOAT_KINDS, rows_of
from engine.runtime.schemes.linear import (
    Circumstances,
    Matrix,
    Product,
    Scheme,
    native_product,
    native_refusal,
    stored_rows,
)


class Int8Scheme(Scheme):
    """Any weights, rounded to 8-bit integers on a CPU; only asked for by name."""

    is_native = True

    @classmethod
    def refusal(cls, here: Circumstances) -> str | None:
        return native_refusal(here)

    def product(self, matrix: Matrix) -> Product:
        library, parts = native(), stored_rows(matrix)
        if library is None:
            return super().product(matrix)
        if parts is None or any(part.kind != FLOAT_KINDS[matrix.dtype] for part in parts):
            parts = [rows_of(self.dense(matrix))]
        return native_product(library, WeightFormat.INT8, parts, matrix)
