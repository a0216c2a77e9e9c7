"""Turns packed weights into rows of GGUF's simplest types, which the native library multiplies as they are.

Integers of up to 4 bits become Q4_0 or Q4_1, wider ones Q8_0; scales become float16. MXFP4 stays itself. FP8 becomes Q8_0, with a new scale
for every 32 inputs: codes of 8 bits are finer than its three bits of mantissa. Other weights are dequantised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.runtime.native.rows import StoredRows
from engine.runtime.weights.stored.packed import Blocks, Integers, Microscaled, Packed

_Q4_0, _Q4_1, _Q8_0, _MXFP4 = 2, 3, 8, 39  # GGUF's numbers
_BLOCK = 32  # weights of a block
_PRECISION = 2.0**-10  # error of scales kept as float16, relative to the largest of the row


def rows_of(packed: Packed) -> StoredRows | None:
    """Return rows with the same weights; None if no type holds them."""
    if isinstance(packed, Integers):
        return _of_integers(packed)
    if isinstance(packed, Microscaled):
        return _rows(_MXFP4, packed.exponents[:, :, None], _nibbles(packed.codes))
    return _of_blocks(packed) if isinstance(packed, Blocks) else None


def _of_integers(packed: Integers) -> StoredRows | None:
    inputs, group = packed.codes.shape[1], packed.group
    is_even = inputs % _BLOCK == 0 and (group % _BLOCK == 0 or group >= inputs)
    scales = _as_float16(packed.scales.float())
    if packed.group_of is not None or not is_even or scales is None:
        return None
    zeros = packed.zeros
    lowest, highest = -int(zeros.max()), (1 << packed.bits) - 1 - int(zeros.min())
    heads = _by_block(scales, inputs, group)
    if lowest >= -8 and highest <= 7:
        codes = _nibbles(_shifted(packed, 8))
        return _rows(_Q4_0, _bytes(heads, codes), codes)
    if packed.bits <= 4:
        minimums = _by_block((-packed.scales.float() * zeros).half(), inputs, group)
        codes = _nibbles(packed.codes)
        return _rows(_Q4_1, _bytes(heads, codes), _bytes(minimums, codes), codes)
    if lowest >= -128 and highest <= 127:
        codes = _shifted(packed, 0).unflatten(1, (-1, _BLOCK))
        return _rows(_Q8_0, _bytes(heads, codes), codes)
    return None


def _shifted(packed: Integers, offset: int) -> Tensor:
    """Return codes less zeros plus an offset, modulo 256."""
    shift = (offset - packed.zeros).to(torch.uint8)
    if not bool(shift.any()):
        return packed.codes
    codes, shift = packed.grouped(packed.codes, shift)
    return (codes + shift).view(packed.codes.shape)


def _of_blocks(packed: Blocks) -> StoredRows | None:
    if packed.values.shape[1] % _BLOCK:
        return None
    weight = packed.dequantise().unflatten(1, (-1, _BLOCK))
    peak = torch.maximum(weight.amax(2), -weight.amin(2))
    scales = (peak / 127).half()
    if not bool(scales.isfinite().all()):
        return None
    inverse = torch.where(scales > 0, 1 / scales.float(), 0)
    codes = weight.mul_(inverse[:, :, None]).round_().clamp_(-127, 127).to(torch.int8)
    return _rows(_Q8_0, _bytes(scales, codes), codes.view(torch.uint8))


def _as_float16(scales: Tensor) -> Tensor | None:
    """Return scales [rows, groups] as float16; None if it is too coarse for the largest of a row, or too small."""
    rounded = scales.half()
    is_near = (rounded.float() - scales).abs() <= scales.abs().amax(1, keepdim=True) * _PRECISION
    return rounded if bool(is_near.all()) else None


def _by_block(values: Tensor, inputs: int, group: int) -> Tensor:
    """Return a value for each block, [rows, blocks], of one for each group."""
    num_blocks = inputs // _BLOCK
    if values.shape[1] == 1:
        return values.expand(-1, num_blocks)
    return values.repeat_interleave(group // _BLOCK, 1)[:, :num_blocks]


def _nibbles(codes: Tensor) -> Tensor:
    """Return bytes [rows, blocks, 16]: code i of a block is the low half of byte i, code i + 16 the high one."""
    blocks = codes.unflatten(1, (-1, 2, _BLOCK // 2))
    return blocks[:, :, 0] | blocks[:, :, 1] << 4


def _rows(kind: int, *parts: Tensor) -> StoredRows:
    """Return rows of blocks; parts are bytes [rows, blocks, n]."""
    return StoredRows(kind, torch.cat(parts, 2).flatten(1).numpy())


def _bytes(heads: Tensor, like: Tensor) -> Tensor:
    """Return float16 heads, one for each block of `like` or for fewer, as bytes [rows, blocks, 2]."""
    return heads.expand(like.shape[:2]).contiguous().view(torch.uint8).unflatten(1, (-1, 2))
