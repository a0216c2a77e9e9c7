"""Weights of a module as codes with scales, and how they are dequantised, in float32.

Used while a model is loaded. Tensors are on the CPU; codes may still be in a file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.runtime.native.rows import CodeLayout, StoredRows


class CodeLocation(NamedTuple):
    """Where codes lie in a file; a code is the stored one plus an offset, modulo 256."""

    layout: CodeLayout
    rows: Callable[[], StoredRows]
    bits: int
    offset: int = 0


class Codes(NamedTuple):
    """Codes in a file, read whenever they are needed; `place` is for the native library, if it knows the layout."""

    shape: tuple[int, int]
    read: Callable[[], Tensor]  # [rows, inputs]
    place: CodeLocation | None = None


class Integers(NamedTuple):
    """weight[i, j] = scales[i, g] * (codes[i, j] - zeros[i, g]), where g is the group of input j."""

    codes: Codes  # uint8 [rows, inputs]
    scales: Tensor  # floats [rows, groups]
    zeros: Tensor  # int16 [rows, groups], or [1, 1]
    bits: int  # of a code
    group: int  # inputs of a group
    group_of: Tensor | None = None  # int64 [inputs], if the groups are not in the order of the inputs

    def dequantise(self) -> Tensor:
        """Return the weight, float32 [rows, inputs]."""
        weight = self.codes.read().float()
        for values, apply in ((self.zeros.float(), torch.Tensor.sub_), (self.scales.float(), torch.Tensor.mul_)):
            apply(*self.grouped(weight, values))
        return weight

    def grouped(self, matrix: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return a view of a matrix [rows, inputs], and values [rows, groups] that broadcast over it."""
        if values.shape[1] == 1:
            return matrix, values
        if self.group_of is not None:
            return matrix, values[:, self.group_of]
        if matrix.shape[1] % self.group == 0:
            return matrix.unflatten(1, (-1, self.group)), values[:, :, None]
        return matrix, values.repeat_interleave(self.group, 1)[:, : matrix.shape[1]]


class Blocks(NamedTuple):
    """weight[i, j] = values[i, j] * scales[i // block[0], j // block[1]]."""

    values: Codes  # float8_e4m3fn [rows, inputs]
    scales: Tensor  # float32 [blocks of rows, blocks of inputs], or with fewer of one for all
    block: tuple[int, int]

    def dequantise(self) -> Tensor:
        """Return the weight, float32 [rows, inputs]; the last blocks may be cut off."""
        scales = self.scales
        for dim, (side, size) in enumerate(zip(self.block, self.values.shape, strict=True)):
            if scales.shape[dim] > 1:
                scales = scales.repeat_interleave(side, dim).narrow(dim, 0, size)
        return self.values.read().float().mul_(scales)


class Floats(NamedTuple):
    """Weights that have been dequantised."""

    weight: Tensor  # float32 [rows, inputs]

    def dequantise(self) -> Tensor:
        """Return the weight."""
        return self.weight


class Microscaled(NamedTuple):
    """MXFP4: weight[i, j] = e2m1(codes[i, j]) * e8m0(exponents[i, j // 32])."""

    codes: Codes  # uint8 [rows, inputs]
    exponents: Tensor  # uint8 [rows, inputs / 32]

    def dequantise(self) -> Tensor:
        """Return the weight, float32 [rows, inputs]."""
        return e2m1(self.codes.read()) * e8m0(self.exponents).repeat_interleave(32, 1)


Packed = Integers | Blocks | Microscaled | Floats


def unpack_bits(words: Tensor, bits: int, num: int) -> Tensor:
    """Return the first `num` codes, uint8 [rows, num], of int32 words [rows, n].

    Codes follow each other from the lowest bit of the first word, and may cross words.
    """
    stored = words.contiguous().view(torch.uint8)
    if bits == 8:
        return stored[:, :num]
    if bits == 4:
        return torch.stack((stored & 15, stored >> 4), 2).flatten(1)[:, :num]
    if bits == 2:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        codes = (stored[:, :, None] >> shifts) & ((1 << bits) - 1)
        return codes.flatten(1)[:, :num]
    at = torch.arange(num) * bits
    wide = torch.nn.functional.pad(stored, (0, 1))
    low, high = wide[:, at // 8].int(), wide[:, at // 8 + 1].int()
    return ((low | high << 8) >> (at % 8).int() & ((1 << bits) - 1)).to(torch.uint8)


def e2m1(nibbles: Tensor) -> Tensor:
    """Return float32 of 4-bit floats: two bits of exponent, one of mantissa."""
    table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    return table[nibbles.int()]


def e8m0(exponents: Tensor) -> Tensor:
    """Return float32 of powers of two stored as uint8; 255 is NaN."""
    scales = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)
    return torch.where(exponents == 255, torch.nan, scales)
