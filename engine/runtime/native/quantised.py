"""Products with weights that stay quantised: rows of a GGUF file, or int8 made here.

x is quantised as well, row by row, while it is packed for a product: to bytes with a scale for every 32 inputs. Built
at start-up, called by the engine thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from engine.runtime.native.library import DTYPES, DequantArgs, Library, WeightFormat
from engine.runtime.native.ops import stored_args
from engine.runtime.native.rows import StoredRows, in_halves


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


def dequantise(library: Library, stored: StoredRows, out: Tensor) -> None:
    """Write rows as floats to `out` [rows, inputs]: contiguous, on the CPU, of one of DTYPES."""
    if stored.head_rows:
        stored = StoredRows(stored.kind, in_halves(stored.rows, stored.head_rows))
    assert out.is_contiguous()
    assert len(out) == len(stored.rows)
    library.dequantise(DequantArgs(stored_args(stored), out.data_ptr(), out.shape[1], DTYPES[out.dtype]))
