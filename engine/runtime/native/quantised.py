"""Products with weights that stay quantised: rows of a GGUF file, or int8 made here.

x is quantised as well, row by row, while it is packed for a product: to bytes with a scale for every 32 inputs. Built
at start-up, called by the engine thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.runtime.native.library import DTYPES, DequantArgs, Library, LinearArgs, RowsArgs, WeightFormat
from engine.runtime.native.ops import FLOAT_KINDS, PANEL, NativeLinear, stored_args, tensor_args
from engine.runtime.native.rows import RepackedRows, StoredRows, in_halves


class _Needs(NamedTuple):
    """What a row format needs to hold a type without loss: bits, finer scales, minimums.

    A matrix of one type, or of several with the same `exact` format, has that format.
    """

    bits: int
    has_halves: bool
    has_min: bool
    exact: WeightFormat | None = None


_NEEDS = {
    2: _Needs(4, False, False),  # Q4_0
    3: _Needs(4, False, True),  # Q4_1
    6: _Needs(5, False, False),  # Q5_0
    7: _Needs(5, False, True),  # Q5_1
    8: _Needs(8, False, False),  # Q8_0
    10: _Needs(2, True, True),  # Q2_K
    11: _Needs(3, True, False),  # Q3_K
    12: _Needs(4, False, True, WeightFormat.Q4_SUPER),  # Q4_K
    13: _Needs(5, False, True, WeightFormat.Q5_SUPER),  # Q5_K
    14: _Needs(6, True, False),  # Q6_K
    18: _Needs(8, False, False, WeightFormat.IQ3_XXS),
    20: _Needs(8, False, False, WeightFormat.IQ4),  # IQ4_NL
    21: _Needs(8, False, False, WeightFormat.IQ3_S),
    23: _Needs(8, False, False, WeightFormat.IQ4),  # IQ4_XS
    39: _Needs(8, False, False, WeightFormat.MXFP4),
}
_FORMATS = {  # what each row format that holds several types has, smallest first
    WeightFormat.Q2_HALF_MIN: _Needs(2, True, True),
    WeightFormat.Q3_HALF: _Needs(3, True, False),
    WeightFormat.Q4: _Needs(4, False, False),
    WeightFormat.Q4_MIN: _Needs(4, False, True),
    WeightFormat.Q5: _Needs(5, False, False),
    WeightFormat.Q5_MIN: _Needs(5, False, True),
    WeightFormat.Q6_HALF: _Needs(6, True, False),
    WeightFormat.Q6_HALF_MIN: _Needs(6, True, True),
    WeightFormat.Q8: _Needs(8, False, False),
    WeightFormat.Q8_HALF: _Needs(8, True, False),
    WeightFormat.Q8_HALF_MIN: _Needs(8, True, True),
}


def is_served_quantised(kinds: Iterable[int]) -> bool:
    """Return whether a matrix with parts of these GGUF types is multiplied as stored.

    The exponents of MXFP4 have no other row format, so its parts do not mix with those of other types.
    """
    exact = {_NEEDS[kind].exact if kind in _NEEDS else None for kind in kinds}
    return all(kind in _NEEDS for kind in kinds) and (WeightFormat.MXFP4 not in exact or len(exact) == 1)


def format_for(kinds: Sequence[int]) -> WeightFormat:
    """Return the smallest row format that holds all these types without loss."""
    needs = [_NEEDS[kind] for kind in kinds]
    exact = needs[0].exact
    if exact is not None and all(need.exact is exact for need in needs):
        return exact
    wanted = [max(column) for column in zip(*(need[:3] for need in needs), strict=True)]
    return next(name for name, has in _FORMATS.items() if all(a >= b for a, b in zip(has, wanted, strict=False)))


@cache
def _grid(kind: int) -> np.ndarray | None:
    """Return the levels 0 to 7 of a type's grid, four for each entry; None for a type without one."""
    from gguf import quants

    known: dict[int, type[Any]] = {18: quants.IQ3_XXS, 21: quants.IQ3_S}
    if kind not in known:
        return None
    known[kind].init_grid()
    return np.searchsorted(known[kind].grid_map, known[kind].grid.ravel()).astype(np.uint8)


def _stored(part: StoredRows | RepackedRows) -> RowsArgs:
    """Return the library's description of rows, with their type's grid."""
    args, grid = stored_args(part), _grid(part.kind)
    args.grid = None if grid is None else grid.ctypes.data
    return args


def _with_kind(stored: RowsArgs, kind: int) -> RowsArgs:
    stored.kind = kind
    return stored


def dequantise(library: Library, stored: StoredRows, out: Tensor) -> None:
    """Write rows as floats to `out` [rows, inputs]: contiguous, on the CPU, of one of DTYPES."""
    if stored.head_rows:
        stored = StoredRows(stored.kind, in_halves(stored.rows, stored.head_rows))
    assert out.is_contiguous()
    assert len(out) == len(stored.rows)
    library.dequantise(DequantArgs(_stored(stored), out.data_ptr(), out.shape[1], DTYPES[out.dtype]))


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
    def from_rows(
        cls,
        library: Library,
        parts: Sequence[StoredRows | RepackedRows],
        num_inputs: int,
        dtype: torch.dtype,
        bias: Tensor | None,
        activation: int = 0,
    ) -> QuantisedLinear:
        """Pack the rows of one matrix, in parts that may be of several types."""
        shape = (sum(part.num_rows for part in parts), num_inputs)
        made = cls(library, format_for([part.kind for part in parts]), shape, dtype, bias, activation)
        made.fill([(_stored(part), part.head_rows) for part in parts], parts)
        return made

    @classmethod
    def int8(cls, library: Library, weight: Tensor, bias: Tensor | None, activation: int = 0) -> QuantisedLinear:
        """Quantise a float matrix, with one scale for each row."""
        assert weight.is_contiguous()
        made = cls(library, WeightFormat.INT8, (weight.shape[0], weight.shape[1]), weight.dtype, bias, activation)
        made.fill([(_with_kind(tensor_args(weight), DTYPES[weight.dtype]), 0)])
        return made

    @classmethod
    def int8_from_rows(
        cls,
        library: Library,
        parts: Sequence[StoredRows],
        num_inputs: int,
        dtype: torch.dtype,
        bias: Tensor | None,
        activation: int = 0,
    ) -> QuantisedLinear:
        """Quantise the rows of one matrix, which are stored as `dtype`."""
        assert all(part.kind == FLOAT_KINDS[dtype] for part in parts)
        made = cls(
            library, WeightFormat.INT8, (sum(len(part.rows) for part in parts), num_inputs), dtype, bias, activation
        )
        made.fill([(_with_kind(stored_args(part), DTYPES[dtype]), part.head_rows) for part in parts], parts)
        return made

    @property
    def has_rows(self) -> bool:
        """Return whether `rows` can read the matrix: not if it was rounded here."""
        return self._scales is None
