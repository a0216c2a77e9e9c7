"""The instruction sets that tests of the native library run on, and its products with matrices at hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.runtime.native.build import Isa, machine_isas
from engine.runtime.native.library import Library, WeightFormat
from engine.runtime.native.ops import FLOAT_FORMATS, NativeLinear, format_for, rows_of
from engine.runtime.native.rows import RepackedRows, StoredRows

# AVX512VNNI multiplies floats as AVX512 does, and bytes as AVX512BF16. Of AMX there is a model (tile_model.py).
_ELSEWHERE = (Isa.AVX512VNNI, Isa.AMX)
ISAS = (*(isa for isa in machine_isas() or (Isa.PORTABLE,) if isa not in _ELSEWHERE), Isa.AMX)


def packed(library: Library, weight: Tensor, bias: Tensor | None = None, activation: int = 0) -> NativeLinear:
    """Return the product with floats."""
    kind = FLOAT_FORMATS[weight.dtype]
    return NativeLinear(library, kind, [rows_of(weight)], weight.shape[1], weight.dtype, bias, activation)


def int8(library: Library, weight: Tensor, bias: Tensor | None = None, activation: int = 0) -> NativeLinear:
    """Return the product with floats that are rounded to int8."""
    parts = [rows_of(weight)]
    return NativeLinear(library, WeightFormat.INT8, parts, weight.shape[1], weight.dtype, bias, activation)


def quantised(
    library: Library,
    parts: Sequence[StoredRows | RepackedRows],
    num_inputs: int,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    activation: int = 0,
) -> NativeLinear:
    """Return the product with rows as stored."""
    kind = format_for([part.kind for part in parts])
    return NativeLinear(library, kind, parts, num_inputs, dtype, bias, activation)
