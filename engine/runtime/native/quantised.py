"""Products with weights that stay quantised: rows of a GGUF file, or int8 made here.

x is quantised as well, row by row, while it is packed for a product: to bytes with a scale for every 32 inputs. Built
at start-up, called by the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.runtime.native.library import DTYPES, Library, LinearArgs, QuantSource, WeightFormat
from engine.runtime.native.ops import PANEL, NativeLinear
from engine.runtime.weights.checkpoint import QuantisedRows


class _Needs(NamedTuple):
    """What a format needs to hold a type without loss: bits, finer scales, minimums."""

    bits: int
    has_halves: bool
    has_min: bool


_NEEDS = {
    2: _Needs(4, False, False),  # Q4_0
    3: _Needs(4, False, True),  # Q4_1
    6: _Needs(8, False, False),  # Q5_0
    7: _Needs(8, True, True),  # Q5_1
    8: _Needs(8, False, False),  # Q8_0
    12: _Needs(4, False, True),  # Q4_K
    13: _Needs(8, True, True),  # Q5_K
    14: _Needs(8, True, False),  # Q6_K
}
_FORMATS = {  # the properties of each format, smallest first
    WeightFormat.Q4: _Needs(4, False, False),
    WeightFormat.Q4_MIN: _Needs(4, False, True),
    WeightFormat.Q8: _Needs(8, False, False),
    WeightFormat.Q8_HALF: _Needs(8, True, False),
    WeightFormat.Q8_HALF_MIN: _Needs(8, True, True),
}


def is_served_quantised(kind: int) -> bool:
    """Return whether a GGUF type is multiplied as stored."""
    return kind in _NEEDS


def format_for(kinds: Sequence[int]) -> WeightFormat:
    """Return the smallest format that holds all these types without loss."""
    needs = [_NEEDS[kind] for kind in kinds]
    wanted = _Needs(*map(max, *needs, needs[0]))
    return next(name for name, has in _FORMATS.items() if all(a >= b for a, b in zip(has, wanted, strict=True)))


class QuantisedLinear(NativeLinear):
    """A quantised matrix [outputs, inputs]: y = x W^T + b, with the same bits in any batch."""

    __slots__ = ("_scales",)

    def __init__(
        self,
        library: Library,
        weight_format: WeightFormat,
        shape: tuple[int, int],
        dtype: torch.dtype,
        bias: Tensor | None,
        activation: int = 0,
    ) -> None:
        """Allocate zeros, for x and bias of `dtype`. PackedLinear explains `activation`."""
        assert bias is None or (bias.dtype is dtype and bias.is_contiguous())
        num_outputs, num_inputs = shape
        self._library, self._bias = library, bias
        self._packed = library.weights.zeros(library.quant_bytes(weight_format, *shape), dtype=torch.uint8)
        is_int8 = weight_format is WeightFormat.INT8
        self._scales = torch.zeros(-(-num_outputs // PANEL) * PANEL) if is_int8 else None
        self.args = LinearArgs(self._packed.data_ptr(), n=num_outputs, k=num_inputs, format=weight_format)
        self.args.dtype, self.args.activation = DTYPES[dtype], activation
        if self._scales is not None:
            self.args.scales = self._scales.data_ptr()
        if bias is not None:
            self.args.bias = bias.data_ptr()

    @classmethod
    def from_gguf(
        cls,
        library: Library,
        parts: Sequence[QuantisedRows],
        num_inputs: int,
        dtype: torch.dtype,
        bias: Tensor | None,
        activation: int = 0,
    ) -> QuantisedLinear:
        """Pack the rows of one matrix, in parts that may be of several types."""
        shape = (sum(len(part.rows) for part in parts), num_inputs)
        made = cls(library, format_for([part.kind for part in parts]), shape, dtype, bias, activation)
        first_row = 0
        for part in parts:
            rows = np.ascontiguousarray(part.rows)
            made._fill(rows.ctypes.data, rows.shape[1], len(rows), first_row, part.kind)
            first_row += len(rows)
        return made

    @classmethod
    def int8(cls, library: Library, weight: Tensor, bias: Tensor | None, activation: int = 0) -> QuantisedLinear:
        """Quantise a float matrix, with one scale for each row."""
        assert weight.is_contiguous()
        made = cls(library, WeightFormat.INT8, (weight.shape[0], weight.shape[1]), weight.dtype, bias, activation)
        made._fill(weight.data_ptr(), weight.stride(0) * weight.itemsize, len(weight), 0, DTYPES[weight.dtype])
        return made

    def _fill(self, rows: int, row_bytes: int, num_rows: int, first_row: int, kind: int) -> None:
        source = QuantSource(
            rows, self.args.packed, self.args.scales, row_bytes, num_rows, first_row, self.args.n, self.args.k
        )
        source.kind, source.format, source.activation = kind, self.args.format, self.args.activation
        self._library.quant_pack(source)
