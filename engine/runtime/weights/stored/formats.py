"""Formats of packed modules: which tensors each has, and how they are unpacked.

A format is one class and one line of `format_of`, which chooses by the tensors. An ending whose shape is not certain is
looked up in the headers; fill.py compares all shapes with the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engine.core.errors import ModelLoadError
from engine.runtime.native.rows import CodeLayout, StoredRows
from engine.runtime.weights.checkpoint import StoredTensor
from engine.runtime.weights.stored.packed import (
    Blocks,
    CodeLocation,
    Codes,
    Floats,
    Integers,
    Microscaled,
    Packed,
    Part,
    e2m1,
    read,
    read_scales,
    unpack_bits,
)

Shapes = dict[str, tuple[int, ...]]
Tensors = Mapping[str, StoredTensor]
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word that holds each of its eight outputs


class Format(Protocol):
    """The tensors of a packed module."""

    @staticmethod
    def shapes(part: Part) -> Shapes:
        """Return the endings of their names, and shapes."""

    @staticmethod
    def unpack(part: Part, tensors: Tensors) -> Packed:
        """Return codes and scales, or floats, in rows of outputs."""


def format_of(part: Part) -> type[Format]:
    """Return the format of a packed module, by its tensors."""
    if part.has(".qweight"):
        return Awq if part.settings.is_awq else Gptq
    if part.has("_blocks"):
        return Mxfp4
    if part.has(".weight_packed"):
        if part.kind(".weight_packed") == "I32":
            return PackedIntegers
        return Nvfp4 if part.has(".weight_global_scale") else Mxfp4
    if part.kind(".weight") == "F8_E4M3":
        return Fp8
    if part.kind(".weight") == "I8":
        return Int8
    return Nvfp4 if part.has(".weight_scale_2") else BnbNf4


def _order(part: Part, stored: Tensor, group: int) -> Tensor | None:
    """Return the group of each input; None if they are in order, or not initialised (-1)."""
    groups = stored.long()
    num_groups = -(-part.inputs // group)
    if bool((groups == -1).all()) or torch.equal(groups, torch.arange(part.inputs) // group):
        return None
    unknown = groups[(groups < 0) | (groups >= num_groups)]
    if len(unknown):
        raise ModelLoadError(
            f"{part.name}: 'g_idx' names group {int(unknown[0])}, and there are {num_groups}, from 0; download the model again."
        )
    return groups


def _codes(
    part: Part,
    stored: StoredTensor,
    layout: CodeLayout | None,
    convert: Callable[[Tensor], Tensor],
    offset: int = 0,
    lay_out: Callable[[Tensor], Tensor] | None = None,
) -> Codes:
    """Return codes in a file, which `convert` turns into [rows, inputs].

    The library reads them in `layout`, if they lie so, or `lay_out` brings them there; None: it does not.
    """
    rows = stored.rows if lay_out is None else lambda: StoredRows(-1, lay_out(read(stored)).numpy())
    place = None if layout is None or rows is None else CodeLocation(layout, rows, offset)
    return Codes((part.rows, part.inputs), lambda: convert(read(stored)), place)


def _signed(stored: Tensor) -> Tensor:
    """Return signed bytes as codes, which are 128 above them."""
    return stored.view(torch.uint8).bitwise_xor_(128)


class PackedIntegers:
    """pack-quantized of compressed-tensors: 1 to 8 bits along the inputs, zero points along the outputs."""

    @staticmethod
    def shapes(part: Part) -> Shapes:
        bits, groups = part.settings.bits, -(-part.inputs // part.group)
        scales = [(part.rows, groups), *([(1,), (), (part.rows,)] if groups == 1 else [])]
        found = {
            ".weight_packed": (part.rows, -(-part.inputs * bits // 32)),
            ".weight_scale": part.shape(".weight_scale", *scales),
        }
        if part.has(".weight_zero_point"):
            found[".weight_zero_point"] = (-(-part.rows * bits // 32), groups)
        if part.has(".weight_g_idx"):
            found[".weight_g_idx"] = (part.inputs,)
        return found

    @staticmethod
    def unpack(part: Part, tensors: Tensors) -> Packed:
        """Return the codes; those and zero points are stored with the same offset, which cancels."""
        bits = part.settings.bits
        zeros = _middle(bits)
        layout = {4: CodeLayout.NIBBLES, 8: CodeLayout.BYTES}.get(bits)
        convert = partial(unpack_bits, bits=bits, num=part.inputs)
        codes = _codes(part, tensors[".weight_packed"], layout, convert)
        scales = read_scales(tensors[".weight_scale"])
        if ".weight_zero_point" in tensors:
            zeros = unpack_bits(read(tensors[".weight_zero_point"]).t(), bits, part.rows).t().short()
        order = _order(part, read(tensors[".weight_g_idx"]), part.group) if ".weight_g_idx" in tensors else None
        return Integers(codes, _by_row(scales, part.rows), zeros, bits, part.group, order)


class Int8:
    """Bytes with a scale for each row or for all, and zero points: int-quantized of compressed-tensors.

    Of bitsandbytes a scale is the row's largest magnitude, which is 127.
    """

    @staticmethod
    def shapes(part: Part) -> Shapes:
        if part.has(".SCB"):
            return {".weight": (part.rows, part.inputs), ".SCB": (part.rows,)}
        groups = -(-part.inputs // part.group)
        allowed = [(part.rows, groups), *([(part.rows,), (1,), ()] if groups == 1 else [])]
        found = {".weight": (part.rows, part.inputs), ".weight_scale": part.shape(".weight_scale", *allowed)}
        if part.has(".weight_zero_point"):
            found[".weight_zero_point"] = part.shape(".weight_zero_point", *allowed)
        return found

    @staticmethod
    def unpack(part: Part, tensors: Tensors) -> Packed:
        """Return the codes, 128 above the stored ones, as are the zero points."""
        codes = _codes(part, tensors[".weight"], CodeLayout.BYTES, _signed, 128)
        zeros = _middle(8)
        if ".SCB" in tensors:
            return Integers(codes, read(tensors[".SCB"]).float()[:, None] / 127, zeros, 8, part.inputs)
        if ".weight_zero_point" in tensors:
            zeros = _by_row(read(tensors[".weight_zero_point"]).short() + 128, part.rows)
        scales = _by_row(read_scales(tensors[".weight_scale"]), part.rows)
        return Integers(codes, scales, zeros, 8, part.group)


class Fp8:
    """Floats of 8 bits, with a scale for all, for each row or for each block; a scale multiplies."""

    @staticmethod
    def shapes(part: Part) -> Shapes:
        """Return the endings of their names, and shapes: a grid of blocks may be larger than the matrix."""
        scale = Fp8._scale(part)
        rows, inputs = Fp8._block(part)
        grid = (-(-part.rows // rows), -(-part.inputs // inputs))
        allowed = [grid, (1,), (), (part.rows, 1), (part.rows,), (grid[0], 1, grid[1], 1)]
        found = part.headers[part.name + scale].shape if part.has(scale) else ()
        is_padded = len(found) == 2 and found[0] >= grid[0] and found[1] == grid[1]
        shape = found if is_padded else part.shape(scale, *allowed)
        return {".weight": (part.rows, part.inputs), scale: shape}

    @staticmethod
    def unpack(part: Part, tensors: Tensors) -> Packed:
        """Return the values and a grid of scales."""
        block, scales = Fp8._block(part), read_scales(tensors[Fp8._scale(part)])
        values = _codes(part, tensors[".weight"], CodeLayout.FP8, lambda stored: stored)
        if scales.dim() == 4:
            scales = scales[:, 0, :, 0]
        grid = (-(-part.rows // block[0]), -(-part.inputs // block[1]))
        if scales.numel() == 1 or (scales.shape in ((part.rows, 1), (part.rows,)) and grid != scales.shape):
            return Blocks(values, scales.reshape(-1, 1), (1, part.inputs))
        return Blocks(values, scales[: grid[0]], block)

    @staticmethod
    def _scale(part: Part) -> str:
        return next((end for end in (".weight_scale_inv", ".qscale_weight") if part.has(end)), ".weight_scale")

    @staticmethod
    def _block(part: Part) -> tuple[int, int]:
        """Return the sides of a block; scales of a byte are MXFP8's, one for 32 inputs."""
        is_mx = part.kind(Fp8._scale(part)) == "U8"
        return (1, 32) if is_mx else part.settings.block


class Awq:
    """AWQ for `gemm`: eight outputs a word, shuffled; outputs are the second axis."""

    @staticmethod
    def shapes(part: Part) -> Shapes:
        """Return the endings of their names, and shapes; symmetric files have no zero points."""
        groups, words = -(-part.inputs // part.group), -(-part.rows // 8)
        found: Shapes = {".qweight": (part.inputs, words), ".scales": (groups, part.rows)}
        return found | ({".qzeros": (groups, words)} if part.has(".qzeros") else {})

    @staticmethod
    def unpack(part: Part, tensors: Tensors) -> Packed:
        """Return the codes in rows of outputs."""
        convert, zeros = partial(Awq._nibbles, rows=part.rows), _middle(4)
        lay_out = partial(Awq._pairs, rows=part.rows)
        codes = _codes(part, tensors[".qweight"], CodeLayout.NIBBLES, convert, lay_out=lay_out)
        if ".qzeros" in tensors:
            zeros = convert(read(tensors[".qzeros"])).short()
        return Integers(codes, read(tensors[".scales"]).t(), zeros, 4, part.group)

    @staticmethod
    def _nibbles(words: Tensor, rows: int) -> Tensor:
        """Return uint8 [rows, n] of words [n, rows / 8]."""
        codes = unpack_bits(words, 4, 8 * words.shape[1])
        codes = codes.unflatten(1, (-1, 8))[:, :, list(_AWQ_ORDER)].flatten(1)
        return codes[:, :rows].t().contiguous()

    @staticmethod
    def _pairs(words: Tensor, rows: int) -> Tensor:
        """Return the same two inputs a byte, [rows, n / 2], the even one low: of words as wide as possible at a time."""
        mask, turned = 0x0F0F0F0F, words.t()
        even, odd = turned[:, 0::2].contiguous(), turned[:, 1::2].contiguous()
        halves = (even & mask) | (odd & mask) << 4, (even >> 4 & mask) | (odd & ~mask)  # nibbles 0, 2 ..; 1, 3 ..
        found = torch.empty(len(even), 8, even.shape[1], dtype=torch.uint8)
        for output, nibble in enumerate(_AWQ_ORDER):
            found[:, output] = halves[nibble % 2].view(torch.uint8)[:, nibble // 2 :: 4]
        return found.flatten(0, 1)[:rows]


class Gptq:
    """GPTQ: codes along the inputs, zero points along the outputs; `g_idx` is each input's group."""

    @staticmethod
    def shapes(part: Part) -> Shapes:
        groups, bits = -(-part.inputs // part.group), part.settings.bits
        found = {".qweight": (-(-part.inputs * bits // 32), part.rows), ".scales": (groups, part.rows)}
        if part.has(".qzeros"):
            found[".qzeros"] = (groups, -(-part.rows * bits // 32))
        return found | ({".g_idx": (part.inputs,)} if part.has(".g_idx") else {})

    @staticmethod
    def unpack(part: Part, tensors: Tensors) -> Packed:
        """Return the codes in rows of outputs; the first format stores zero points less 1."""
        bits = part.settings.bits
        zeros = _middle(bits)
        layout = {4: CodeLayout.NIBBLES, 8: CodeLayout.BYTES}.get(bits)
        codes = _codes(
            part, tensors[".qweight"], layout, lambda words: unpack_bits(words.t(), bits, part.inputs),
            lay_out=lambda words: words.t().contiguous().view(torch.uint8),
        )  # fmt: skip
        if ".qzeros" in tensors:
            stored = unpack_bits(read(tensors[".qzeros"]), bits, part.rows).t().short()
            zeros = (stored + part.settings.zero_offset) & (1 << bits) - 1
        order = _order(part, read(tensors[".g_idx"]), part.group) if ".g_idx" in tensors else None
        return Integers(codes, read(tensors[".scales"]).t(), zeros, bits, part.group, order)


class Mxfp4:
    """4-bit floats in neighbouring nibbles, with a power of two for every 32."""

    @staticmethod
    def shapes(part: Part) -> Shapes:
        codes, scales = Mxfp4._endings(part)
        blocks = part.inputs // 32
        shape = (part.rows, blocks, 16) if codes == "_blocks" else (part.rows, part.inputs // 2)
        return {codes: shape, scales: (part.rows, blocks)}

    @staticmethod
    def unpack(part: Part, tensors: Tensors) -> Packed:
        """Return codes and exponents; the low nibble is the even input."""
        codes, scales = Mxfp4._endings(part)
        stored = _codes(part, tensors[codes], CodeLayout.MXFP4, lambda found: _neighbours(found.flatten(1)))
        return Microscaled(stored, read(tensors[scales]).view(torch.uint8))

    @staticmethod
    def _endings(part: Part) -> tuple[str, str]:
        return ("_blocks", "_scales") if part.has("_blocks") else (".weight_packed", ".weight_scale")


class Nvfp4:
    """4-bit floats with an FP8 scale for every 16, and one for all: ModelOpt's multiplies, the other divides."""

    @staticmethod
    def shapes(part: Part) -> Shapes:
        codes, tensor = Nvfp4._endings(part)
        return {
            codes: (part.rows, part.inputs // 2),
            ".weight_scale": (part.rows, part.inputs // 16),
            tensor: part.shape(tensor, (), (1,)),
        }

    @staticmethod
    def unpack(part: Part, tensors: Tensors) -> Packed:
        """Return the weights."""
        codes, tensor = Nvfp4._endings(part)
        scale = read(tensors[tensor]).float().reshape(())
        scales = read(tensors[".weight_scale"]).float() * (scale if tensor == ".weight_scale_2" else 1 / scale)
        return Floats(e2m1(_neighbours(read(tensors[codes]))) * scales.repeat_interleave(16, 1))

    @staticmethod
    def _endings(part: Part) -> tuple[str, str]:
        if part.has(".weight_packed"):
            return ".weight_packed", ".weight_global_scale"
        return ".weight", ".weight_scale_2"


class BnbNf4:
    """bitsandbytes' 4 bits: a stored table of values, and blocks over the flattened matrix."""

    @staticmethod
    def shapes(part: Part) -> Shapes:
        """Return the endings of their names, and shapes, which are those of the files."""
        endings = ["", ".absmax", ".quant_map", *(end for end in BnbNf4._STATES if part.has(f".weight{end}"))]
        endings += [end for end in (".nested_absmax", ".nested_quant_map") if part.has(f".weight{end}")]
        return {f".weight{end}": part.shape(f".weight{end}", *BnbNf4._allowed(part, end)) for end in endings}

    _STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")

    @staticmethod
    def _allowed(part: Part, ending: str) -> list[tuple[int, ...]]:
        """Return the shapes that a tensor may have."""
        found = part.headers.get(f"{part.name}.weight{ending}")
        if ending == "":
            return [(-(-part.rows * part.inputs // 2), 1)]
        known: dict[str, tuple[int, ...]] = {".quant_map": (16,), ".nested_quant_map": (256,)}
        return [known.get(ending, found.shape if found is not None else (1,))]

    @staticmethod
    def unpack(part: Part, tensors: Tensors) -> Packed:
        """Return the weights; the high nibble is the first of two."""
        state = BnbNf4._state(part, tensors)
        size, block = part.rows * part.inputs, int(state["blocksize"])
        absmax = read(tensors[".weight.absmax"])
        if ".weight.nested_absmax" in tensors:
            outer = read(tensors[".weight.nested_absmax"]).float()
            table = read(tensors[".weight.nested_quant_map"]).float()
            spread = outer.repeat_interleave(int(state["nested_blocksize"]))[: len(absmax)]
            absmax = table[absmax.int()] * spread + float(state["nested_offset"])
        stored = read(tensors[".weight"]).flatten().view(torch.uint8)
        codes = torch.stack((stored >> 4, stored & 15), 1).flatten()[:size]
        weight = read(tensors[".weight.quant_map"]).float()[codes.int()]
        weight *= absmax.float().repeat_interleave(block)[:size]
        return Floats(weight.view(part.rows, part.inputs))

    @staticmethod
    def _state(part: Part, tensors: Tensors) -> Mapping[str, float]:
        """Return the settings that are stored as JSON in a tensor."""
        state = next((tensors[f".weight{end}"] for end in BnbNf4._STATES if f".weight{end}" in tensors), None)
        try:
            found = json.loads(bytes(read(state).tolist())) if state is not None else {}
            block, shape = int(found["blocksize"]), [int(side) for side in found["shape"]]
            if "nested_blocksize" in found:
                float(found["nested_offset"]), int(found["nested_blocksize"])
        except (ValueError, KeyError, TypeError) as error:
            raise ModelLoadError(
                f"{part.name}: 'quant_state' of bitsandbytes cannot be read ({error}); download the model again."
            ) from None
        if shape != [part.rows, part.inputs] or block < 1:
            raise ModelLoadError(
                f"{part.name}: 'quant_state' of bitsandbytes has shape {shape}, but the config asks for "
                f"{[part.rows, part.inputs]}."
            )
        return found


def _middle(bits: int) -> Tensor:
    """Return the zero point of symmetric codes, for all rows and groups."""
    return torch.full((1, 1), 1 << bits - 1, dtype=torch.int16)


def _by_row(values: Tensor, rows: int) -> Tensor:
    """Return [rows, groups] of values for each row, or one for all."""
    return values if values.dim() == 2 else values.reshape(-1, 1).expand(rows, 1)


def _neighbours(stored: Tensor) -> Tensor:
    """Return the nibbles of bytes [rows, n], the low ones first, [rows, 2 n]."""
    return torch.stack((stored & 15, stored >> 4), 2).flatten(1)
