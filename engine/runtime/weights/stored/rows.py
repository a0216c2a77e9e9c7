"""Turns packed weights into rows of GGUF's simplest types, which the native library multiplies as they are.

Integers of up to 4 bits become Q4_0 or Q4_1, wider ones Q8_0; scales become float16. MXFP4 stays itself. FP8 becomes
Q8_0, with a new scale for every 32 inputs: codes of 8 bits are finer than its three bits of mantissa. Other weights are
dequantised.

The type and the scales are decided here. The library makes the rows from codes in the file (repack.c), in the layouts
that it knows; codes in other layouts are decoded to one of these in memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.runtime.native.rows import CodeLayout, RepackedRows, StoredRows
from engine.runtime.weights.stored.packed import Blocks, CodeLocation, Floats, Integers, Microscaled, Packed

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
        values = values.expand(scales.shape)
        return (values.t() if place.layout >= CodeLayout.INPUT_WORDS else values).contiguous()

    return RepackedRows(
        kind=plan.kind,
        num_rows=num_rows,
        row_bytes=num_inputs // _BLOCK * _BLOCK_BYTES[plan.kind],
        num_inputs=num_inputs,
        layout=place.layout,
        codes=place.rows(),
        bits=place.bits,
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
        layout, bits, stored = CodeLayout.FP8, 8, packed.values.read().view(torch.uint8)
    elif isinstance(packed, Integers) and packed.bits > 4:
        layout, bits, stored = CodeLayout.BYTES, 8, packed.codes.read()
    else:
        layout, bits = CodeLayout.NIBBLES if isinstance(packed, Integers) else CodeLayout.MXFP4, 4
        codes = packed.codes.read()
        stored = codes[:, 0::2] | codes[:, 1::2] << 4
    rows = StoredRows(-1, stored.contiguous().numpy())
    return CodeLocation(layout, lambda: rows, bits)


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
