"""Rows of a GGUF file, multiplied as stored by a CPU's native library."""

from __future__ import annotations

from torch import Tensor

from engine.runtime.native.library import native
from engine.runtime.native.ops import NativeLinear, format_for, is_served_quantised
from engine.runtime.schemes.linear import (
    Circumstances,
    Matrix,
    Product,
    Scheme,
    native_product,
    native_refusal,
    stored_rows,
)


class GGUFScheme(Scheme):
    """A matrix is kept as stored if all of its parts are quantised, else dequantised."""

    is_native = True

    @classmethod
    def is_default(cls, here: Circumstances) -> bool:
        """Return whether the file's rows are faster than floats, unless --dtype asks for these."""
        is_fast = here.library is not None and here.library.prefers_codes
        return is_fast and not here.is_dtype_named and cls.refusal(here) is None

    @classmethod
    def refusal(cls, here: Circumstances) -> str | None:
        if not here.has_gguf_rows:
            return "the weights do not come from a GGUF file; int8 quantises those of any"
        return native_refusal(here)

    def product(self, matrix: Matrix) -> Product:
        return self._quantised(matrix) or super().product(matrix)

    def embedding(self, matrix: Matrix) -> NativeLinear | Tensor:
        return self._quantised(matrix) or super().embedding(matrix)

    def _quantised(self, matrix: Matrix) -> NativeLinear | None:
        library, parts = native(), stored_rows(matrix)
        kinds = [part.kind for part in parts or ()]
        if library is None or parts is None or not is_served_quantised(kinds):
            return None
        return native_product(library, format_for(kinds), parts, matrix)
