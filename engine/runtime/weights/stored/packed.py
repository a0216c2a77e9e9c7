"""Weights of a module as codes with scales, and how they are dequantised, in float32.

Used while a model is loaded. Tensors are on the CPU; codes may still be in a file.

The native library multiplies rows of GGUF's simplest types as they are, so packed weights become such rows. Integers of up to 4 bits become Q4_0 or Q4_1, wider ones Q8_0; scales become float16. MXFP4 stays itself. FP8 becomes
Q8_0, with a new scale for every 32 inputs: codes of 8 bits are finer than its three bits of mantissa. Other weights are
dequantised.

The type and the scales are decided here. The library makes the rows from codes in the file (repack.c), in the layouts
that it knows; others are brought to one of these in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.files.quant_config import Settings
from engine.runtime.native.rows import CodeLayout, RepackedRows, StoredRows
from engine.runtime.weights.checkpoint import Headers, StoredTensor, dtype_of


class CodeLocation(NamedTuple):
    """Rows of codes, in a file or made in memory; a code is the stored one plus an offset, modulo 256."""

    layout: CodeLayout
    rows: Callable[[], StoredRows]
    offset: int = 0


class Codes(NamedTuple):
    """Codes in a file, read whenever they are needed; `place` is for the native library, if that can be known."""

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


class Part(NamedTuple):
    """A module: its name, sides and settings, and the headers of all tensors."""

    name: str
    rows: int
    inputs: int
    settings: Settings
    headers: Headers

    def has(self, ending: str) -> bool:
        """Return whether the files hold a tensor of this module."""
        return self.name + ending in self.headers

    def kind(self, ending: str) -> str:
        """Return the stored type of a tensor; "" if it is missing."""
        return self.headers[self.name + ending].kind if self.has(ending) else ""

    def shape(self, ending: str, *allowed: tuple[int, ...]) -> tuple[int, ...]:
        """Return the stored shape if it is an allowed one, else the first of these."""
        found = self.headers[self.name + ending].shape if self.has(ending) else None
        return found if found in allowed else allowed[0]

    @property
    def group(self) -> int:
        """Return the number of inputs that share a scale."""
        return self.settings.group or self.inputs


def read(tensor: StoredTensor) -> Tensor:
    """Return a tensor in its stored type."""
    found = torch.empty(tensor.shape, dtype=dtype_of(tensor.kind))
    tensor.copy_to(found)
    return found


def read_scales(tensor: StoredTensor) -> Tensor:
    """Return scales as float32; those of one byte are powers of two."""
    found = read(tensor)
    if tensor.kind in ("U8", "F8_E8M0"):
        return e8m0(found.view(torch.uint8))
    return found.float()


_Q4_0, _Q4_1, _Q8_0, _MXFP4 = 2, 3, 8, 39  # GGUF's numbers
_BLOCK_BYTES = {_Q4_0: 18, _Q4_1: 20, _Q8_0: 34, _MXFP4: 17}
_BLOCK = 32  # weights of a block
_PRECISION = 2.0**-10  # error of scales kept as float16, relative to the largest of the row
_FP8_MAX, _FLOAT16_MAX = 448.0, 65504.0


class _Plan(NamedTuple):
    """How rows are made of codes: a type, and what is ahead of the codes of a group."""

    kind: int
    scales: Tensor  # [rows, groups]: float16, exponents of MXFP4; float32 of FP8, one for `scale_rows` rows
    group: int
    minimums: Tensor | None = None  # float16, as scales
    shift: Tensor | None = None  # int16, as scales, or [1, 1]: added to codes
    scale_rows: int = 1


def repacked(packed: Packed) -> RepackedRows | None:
    """Return rows with the same weights, which the native library makes while it packs them; None if no type holds them."""
    plan = _plan(packed)
    if plan is None or isinstance(packed, Floats):
        return None
    codes = packed.values if isinstance(packed, Blocks) else packed.codes
    place = codes.place or _decoded(packed)
    (num_rows, num_inputs), scales, shifts, shift = codes.shape, plan.scales, None, 0
    group = num_inputs if scales.shape[1] == 1 else plan.group
    if plan.shift is not None:
        wanted = (plan.shift + place.offset).to(torch.uint8).view(torch.int8)
        shift, shifts = int(wanted.flatten()[0]), wanted if wanted.numel() > 1 else None
    if group % _BLOCK or num_inputs % _BLOCK:
        return None

    def laid_out(values: Tensor) -> Tensor:
        return values.expand(scales.shape).contiguous()

    return RepackedRows(
        kind=plan.kind,
        num_rows=num_rows,
        row_bytes=num_inputs // _BLOCK * _BLOCK_BYTES[plan.kind],
        num_inputs=num_inputs,
        layout=place.layout,
        codes=place.rows(),
        num_groups=scales.shape[1],
        scales=laid_out(scales),
        minimums=None if plan.minimums is None else laid_out(plan.minimums),
        shifts=None if shifts is None else laid_out(shifts),
        shift=shift,
        group=group,
        scale_rows=plan.scale_rows,
    )


def _decoded(packed: Integers | Blocks | Microscaled) -> CodeLocation:
    """Return codes in memory, in a layout that the library reads."""
    if isinstance(packed, Blocks):
        layout, stored = CodeLayout.FP8, packed.values.read().view(torch.uint8)
    elif isinstance(packed, Integers) and packed.bits > 4:
        layout, stored = CodeLayout.BYTES, packed.codes.read()
    else:
        layout, codes = CodeLayout.NIBBLES if isinstance(packed, Integers) else CodeLayout.MXFP4, packed.codes.read()
        stored = codes[:, 0::2] | codes[:, 1::2] << 4
    rows = StoredRows(-1, stored.contiguous().numpy())
    return CodeLocation(layout, lambda: rows)


def _plan(packed: Packed) -> _Plan | None:
    """Return how the rows are made; None if no type holds them."""
    if isinstance(packed, Integers):
        return _plan_integers(packed)
    if isinstance(packed, Microscaled):
        return _Plan(_MXFP4, packed.exponents, _BLOCK)
    if not isinstance(packed, Blocks) or packed.values.shape[1] % _BLOCK:
        return None
    if not float(packed.scales.abs().amax()) * _FP8_MAX / 127 < _FLOAT16_MAX:
        return None
    num_scale_rows = packed.scales.shape[0]
    return _Plan(
        _Q8_0,
        packed.scales.float(),
        packed.block[1],
        scale_rows=packed.block[0] if num_scale_rows > 1 else packed.values.shape[0],
    )


def _plan_integers(packed: Integers) -> _Plan | None:
    inputs, group = packed.codes.shape[1], packed.group
    is_even = inputs % _BLOCK == 0 and (group % _BLOCK == 0 or group >= inputs)
    if packed.group_of is not None or not is_even:
        return None
    stored, zeros = packed.scales.float(), packed.zeros
    scales = _as_float16(stored)
    if scales is None:
        return None
    if zeros.numel() > 1:
        scales = scales.expand(torch.broadcast_shapes(scales.shape, zeros.shape))
    lowest, highest = -int(zeros.max()), (1 << packed.bits) - 1 - int(zeros.min())
    if lowest >= -8 and highest <= 7:
        return _Plan(_Q4_0, scales, group, shift=8 - zeros)
    if packed.bits <= 4:
        return _Plan(_Q4_1, scales, group, minimums=(-stored * zeros).half())
    return _Plan(_Q8_0, scales, group, shift=-zeros) if lowest >= -128 and highest <= 127 else None


def _as_float16(scales: Tensor) -> Tensor | None:
    """Return scales [rows, groups] as float16; None if it is too coarse for the largest of a row, or too small."""
    rounded = scales.half()
    is_near = (rounded.float() - scales).abs() <= scales.abs().amax(1, keepdim=True) * _PRECISION
    return rounded if bool(is_near.all()) else None
