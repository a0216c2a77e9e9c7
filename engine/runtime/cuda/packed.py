"""Matrices as kernels read them: rows of floats, or of codes with scales, which become floats in registers.

A code of 4 or 8 bits is made a float without an instruction that converts integers, of which a GPU has a quarter as
many: its bits become the mantissa of a float16. A group's scale multiplies in float32, and the weight is rounded once,
to the type of the inputs; so it is the weight that dequantising at load gives. One scale for a whole row multiplies the
sum instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.runtime.weights.stored.packed import Blocks, Integers, Microscaled, Packed

MULTIPLE = 32  # required of the inputs of codes
_BLOCKS = (128, 64, 32)  # inputs of a tile of codes
_MASKED = 64  # the same of rows of FP8 that none of these divides


class Rows(NamedTuple):
    """Rows of a matrix, or of one for each expert; the first dimension of all tensors is then the experts'.

    weight[i, j] = number(i, j) * scales[i, j // group]; a number of "int4" and "int8" is a code less its zero.
    """

    numbers: Tensor  # [outputs, inputs] floats, FP8 or bytes; two codes a byte [outputs, inputs / 2], the first one low
    bias: Tensor | None = None  # [outputs]
    kind: str = "float"  # or "fp8", "int8", "int4", "mxfp4", whose scales are bytes: exponents
    scales: Tensor | None = None  # [outputs, groups]
    zeros: Tensor | None = None  # [outputs, groups] uint8; None: `zero` for all
    group: int = 0  # inputs with one scale
    zero: int = 0

    @property
    def num_inputs(self) -> int:
        """Return the width of a matrix."""
        return self.numbers.shape[-1] * (2 if self.kind in ("int4", "mxfp4") else 1)

    @property
    def num_groups(self) -> int:
        """Return the scales of a row."""
        return 0 if self.scales is None else self.scales.shape[-1]

    def on(self, device: torch.device) -> Rows:
        """Return a copy on a device."""
        return Rows._make(x.to(device) if isinstance(x, Tensor) else x for x in self)


def block_of(rows: Rows, most: int) -> int:
    """Return how many inputs of codes a kernel takes at a time: whole groups, or a part of one."""
    sizes = (size for size in _BLOCKS if size <= most and rows.num_inputs % size == 0)
    return next((size for size in sizes if rows.num_groups <= 1 or _fits(rows.group, size)), _MASKED)


def pack_rows(parts: Sequence[Packed]) -> Rows | None:
    """Return stored parts of a matrix as its rows; None if no kernel has their codes, or they differ in kind."""
    found = [_pack(part) for part in parts]
    packed = [rows for rows in found if rows is not None]
    first = packed[0] if packed else None
    if first is None or len(packed) < len(parts) or any((r.kind, r.group) != (first.kind, first.group) for r in packed):
        return None
    if first.num_inputs % MULTIPLE or (first.num_groups > 1 and not _fits(first.group, MULTIPLE)):
        return None
    scales = [rows.scales for rows in packed if rows.scales is not None]
    if len({tensor.dtype for tensor in scales}) > 1:
        scales = [tensor.float() for tensor in scales]
    zeros = None
    if len({rows.zero for rows in packed}) > 1 or any(rows.zeros is not None for rows in packed):
        zeros = torch.cat([_zeros_of(rows) for rows in packed])
    numbers = torch.cat([rows.numbers.view(torch.uint8) for rows in packed]).view(first.numbers.dtype)
    return first._replace(numbers=numbers, scales=torch.cat(scales), zeros=zeros)


def _fits(group: int, size: int) -> bool:
    return group % size == 0 or size % group == 0


def _zeros_of(rows: Rows) -> Tensor:
    assert rows.scales is not None
    return torch.full(rows.scales.shape, rows.zero, dtype=torch.uint8) if rows.zeros is None else rows.zeros


def _pack(part: Packed) -> Rows | None:
    """Return one part's rows, without bias."""
    if isinstance(part, Microscaled):
        return Rows(_nibbles(part.codes.read()), kind="mxfp4", scales=part.exponents, group=32)
    if isinstance(part, Blocks):
        size, scales = part.block[1], part.scales
        if scales.shape[0] > 1:
            scales = scales.repeat_interleave(part.block[0], 0)[: part.values.shape[0]]
        scales = scales.expand(part.values.shape[0], -1).contiguous()
        return Rows(
            part.values.read(), kind="fp8", scales=scales, group=part.values.shape[1] if scales.shape[1] == 1 else size
        )
    if not isinstance(part, Integers) or part.group_of is not None or part.codes.shape[1] % 2:
        return None
    num_rows, num_inputs = part.codes.shape
    scales = part.scales.expand(num_rows, -1).contiguous()
    group = num_inputs if scales.shape[1] == 1 else part.group
    zeros, zero = None, int(part.zeros.flatten()[0])
    if bool((part.zeros != zero).any()):
        zeros, zero = part.zeros.expand(scales.shape).to(torch.uint8).contiguous(), 0
    if part.bits <= 4:
        return Rows(_nibbles(part.codes.read()), kind="int4", scales=scales, zeros=zeros, group=group, zero=zero)
    return Rows(part.codes.read().contiguous(), kind="int8", scales=scales, zeros=zeros, group=group, zero=zero)


def _nibbles(codes: Tensor) -> Tensor:
    """Return two neighbours a byte, the first in the low half."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


@triton.jit
def _scale_of(scales):
    """Return float32 of scales, or of exponents."""
    if scales.dtype == tl.uint8:
        bits = tl.where(scales == 0, 0x00400000, scales.to(tl.int32) << 23)  # 2**-127 is subnormal
        wide = tl.where(scales == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    else:
        wide = scales.to(tl.float32)
    return wide


@triton.jit
def _halves(codes, KIND: tl.constexpr):
    """Return codes as float16: integers, or floats of 4 bits."""
    codes = codes.to(tl.uint16)
    if KIND == "mxfp4":
        # Two bits of exponent and one of mantissa, as those of float16, whose exponents are 14 less.
        bits = ((codes & 7) << 9) | ((codes & 8) << 12)
        wide = bits.to(tl.float16, bitcast=True) * 16384.0
    else:
        wide = (codes | 0x6400).to(tl.float16, bitcast=True) - 1024.0  # 0x6400 is 1024, whose last bit counts 1
    return wide


@triton.jit
def load_weights(
    numbers,
    scales,
    zeros,
    rows,  # [N] int64, of all experts
    start,  # column
    dtype: tl.constexpr,
    INPUTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return weights [N, BLOCK_K] of `dtype`; without their scale if a row has one."""
    if KIND == "float" or KIND == "fp8":
        at = start + tl.arange(0, BLOCK_K)
        to = numbers + (rows * INPUTS)[:, None] + at[None, :]
        if INPUTS % BLOCK_K == 0:
            weight = tl.load(to)
        else:
            weight = tl.load(to, mask=(at < INPUTS)[None, :], other=0.0)
    elif KIND == "int8":
        codes = tl.load(numbers + (rows * INPUTS)[:, None] + start + tl.arange(0, BLOCK_K)[None, :])
        weight = _halves(codes, KIND)
    else:
        at = start // 2 + tl.arange(0, BLOCK_K // 2)
        codes = tl.load(numbers + (rows * (INPUTS // 2))[:, None] + at[None, :])
        weight = _halves(tl.join(codes & 15, codes >> 4), KIND)
    # [N, groups, inputs of a group in this tile]
    held: tl.constexpr = BLOCK_K // GROUP if NUM_GROUPS > 1 and GROUP < BLOCK_K else 1
    if NUM_GROUPS > 1 or zeros is not None or ZERO > 0:
        weight = tl.reshape(weight, [rows.shape[0], held, BLOCK_K // held]).to(tl.float32)
        groups = tl.arange(0, held)
        if NUM_GROUPS > 1:
            groups += start // GROUP
        group_at = (rows * NUM_GROUPS)[:, None] + groups[None, :]
        if zeros is not None:
            zero = _halves(tl.load(zeros + group_at), "int8").to(tl.float32)
            weight -= zero[:, :, None]
        else:
            weight -= ZERO
        if NUM_GROUPS > 1:
            weight *= _scale_of(tl.load(scales + group_at))[:, :, None]
    return tl.reshape(weight, [rows.shape[0], BLOCK_K]).to(dtype)


@triton.jit
def scale_rows(acc, scales, rows, NUM_GROUPS: tl.constexpr):
    """Multiply sums [M, N] by the rows' scales, if each row has one."""
    if NUM_GROUPS == 1:
        acc *= _scale_of(tl.load(scales + rows))[None, :]
    return acc
