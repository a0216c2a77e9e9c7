"""Parts of stored tensors: what one of several ranks reads of a matrix. Imports torch only to copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from engine.runtime.native.rows import StoredRows
from engine.runtime.weights.checkpoint import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor


class Cut(NamedTuple):
    """Elements `first` and on of the `total` along a side."""

    first: int
    num: int
    total: int

    def scaled(self, size: int) -> Cut | None:
        """Return the same part of a side of another size, as scales have it; None if it is no whole number.

        Blocks have sides of a power of two; where the last is not full, the sides show another number.
        """
        if size == self.total:
            return self
        each, rest = divmod(self.total, size)
        if rest or each & (each - 1) or self.first % each or self.num % each:
            return None
        return Cut(self.first // each, self.num // each, size)


class Span(NamedTuple):
    """A part of a module: outputs and inputs of the whole one; None: all."""

    rows: Cut | None = None
    inputs: Cut | None = None


def cut(tensor: StoredTensor, *sides: Cut | None) -> StoredTensor:
    """Return a part of a tensor; a side without a cut is whole."""
    wanted = [each if each is not None else Cut(0, dim, dim) for each, dim in zip(sides, tensor.shape, strict=False)]
    wanted += [Cut(0, dim, dim) for dim in tensor.shape[len(wanted) :]]
    if all(each.num == each.total for each in wanted):
        return tensor
    shape = tuple(each.num for each in wanted)
    num_bytes = tensor.num_bytes * math.prod(shape) // math.prod(tensor.shape)
    rows, copy_rows = tensor.rows, tensor.copy_rows
    if rows is None or copy_rows is None:
        return tensor._replace(shape=shape, num_bytes=num_bytes, rows=None, copy_to=partial(_copy_part, tensor, wanted))

    def part() -> StoredRows:
        return _cut_rows(rows(), wanted[0], wanted[1])

    return tensor._replace(
        shape=shape, num_bytes=num_bytes, rows=part, copy_to=lambda target: copy_rows(part(), target)
    )


def _cut_rows(stored: StoredRows, rows: Cut, inputs: Cut) -> StoredRows:
    """Return a part of rows, which does not cut the blocks of a GGUF type."""
    step, row_bytes = stored.rows.strides[0], stored.rows.shape[1]
    begin, end = (inputs.first + n for n in (0, inputs.num))
    begin, end = begin * row_bytes // inputs.total, end * row_bytes // inputs.total
    return stored._replace(
        rows=stored.rows[rows.first : rows.first + rows.num, begin:end],
        offset=stored.offset + rows.first * step + begin,
    )


def _copy_part(tensor: StoredTensor, sides: Sequence[Cut], target: Tensor) -> None:
    """Read a whole tensor, and copy a part of it: for vectors, and for tensors that do not lie in rows."""
    whole = target.new_empty(tensor.shape)
    tensor.copy_to(whole)
    for dim, side in enumerate(sides):
        whole = whole.narrow(dim, side.first, side.num)
    target.copy_(whole)
