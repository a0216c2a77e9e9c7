"""Weights quantised to int8 at load, with a scale for each row, multiplied by a CPU's native library."""

from __future__ import annotations

from engine.runtime.native.library import native
from engine.runtime.native.ops import FLOAT_KINDS
from engine.runtime.native.quantised import QuantisedLinear
from engine.runtime.schemes.linear import CODES, Product
from engine.runtime.schemes.scheme import Circumstances, Matrix, Scheme, native_refusal, stored_rows


class Int8Scheme(Scheme):
    """Any weights, rounded to 8-bit integers on a CPU; only asked for by name."""

    is_native = True

    @classmethod
    def refusal(cls, here: Circumstances) -> str | None:
        """Return why it is not available; None if it is."""
        return native_refusal(here)

    def product(self, matrix: Matrix) -> Product:
        """Return the product with the quantised rows."""
        library, code = native(), CODES[matrix.activation]
        if library is None:
            return super().product(matrix)
        parts = stored_rows(matrix)
        if parts is not None and all(part.kind == FLOAT_KINDS[matrix.dtype] for part in parts):
            return QuantisedLinear.int8_from_rows(library, parts, matrix.shape[1], matrix.dtype, matrix.bias, code)
        return QuantisedLinear.int8(library, self.dense(matrix), matrix.bias, code)
