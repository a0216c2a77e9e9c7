"""LFM2's mixer: a convolution over the last tokens, between two gates.

A token's projection is [gate b | gate c | x]. The state is the last b * x; the result is c times their convolution.

The torch operations here define the arithmetic; short_conv.c and cuda/short_conv.py have the same. Engine thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.runtime.cuda.available import uses_triton
from engine.runtime.kv_layout import RecurrentSpec
from engine.runtime.layers.model_config import ModelConfig, ShortConvConfig
from engine.runtime.layers.parts import (
    AdaptedMatrix,
    Angles,
    LayerAdapters,
    LayerStates,
    Maker,
    RecurrentState,
    Slice,
    adapted,
    summed,
)
from engine.runtime.layers.recurrence import MOST_TAPS, behind_tail, sums, tail_after, tail_pieces, tokens_of
from engine.runtime.layers.shards import Plan, colwise, rowwise
from engine.runtime.native.library import PartArgs
from engine.runtime.native.parts import describe_part
from engine.runtime.native.structs import structure

_PLAN: Plan = {
    "in_proj": colwise("channels", "channels", "channels"),
    "conv": colwise("channels"),
    "o_proj": rowwise("channels"),
}
ShortConvArgs = structure("short_conv")  # what the native library needs beside the first matrix and the last


class ShortConv:
    """Gates and inputs of x from one matrix; a convolution of gated inputs, gated, and a projection."""

    def __init__(self, config: ModelConfig, layer: int, make: Maker, state: int) -> None:
        make, conv = make.within("conv", plan=_PLAN), config.layers[layer].recurrent
        assert isinstance(conv, ShortConvConfig), "the family has sizes of the convolution"
        self._state, self._conv, self._group = state, conv, make.group
        self._in = make.linear(
            {"in_proj": 3 * conv.channels}, config.hidden_size, bias=conv.has_bias, place=AdaptedMatrix.QKV
        )
        self._weight = make.tensor("conv.weight", conv.channels, 1, conv.kernel, dtype=torch.float32)
        self._bias = make.tensor("conv.bias", conv.channels, dtype=torch.float32) if conv.has_bias else None
        self._o = make.linear({"o_proj": config.hidden_size}, conv.channels, bias=conv.has_bias, place=AdaptedMatrix.O)
        tails = tail_pieces(conv.channels, conv.kernel, make.dtype)
        self.states = (RecurrentSpec((tails,), row=conv.channels, dtype=make.dtype),)

    def __call__(
        self,
        x: Tensor,
        angles: Angles | None,  # noqa: ARG002 - only the order of tokens counts here
        attention: LayerStates,
        adapters: LayerAdapters | None = None,
    ) -> Tensor:
        b, c, rows = adapted(self._in, AdaptedMatrix.QKV, x, adapters).chunk(3, 1)
        rows, state = b * rows, attention.recurrent(self._state)
        if uses_triton(x):
            from engine.runtime.cuda.short_conv import convolve

            mixed = convolve(rows, c, state.on_device, self._weight, self._bias)
        else:
            parts = [
                self._advance(state, i, piece, rows[piece.first : piece.stop]) for i, piece in enumerate(state.slices)
            ]
            mixed = (c.float() * torch.cat(parts)).to(x.dtype)
        return summed(self._o, AdaptedMatrix.O, mixed, adapters, self._group)

    def _advance(self, state: RecurrentState, index: int, piece: Slice, rows: Tensor) -> Tensor:
        """Return the float32 convolution of a slice's rows, and write what it leaves."""
        (tail,) = state.read(index)
        rows = tokens_of(state, index, piece, rows)
        inputs = behind_tail(tail, rows)
        if piece.midway_after:
            state.write(index, (tail_after(inputs, piece.midway_after, tail),), midway=True)
        state.write(index, (tail_after(inputs, len(rows) - piece.num_drafts, tail),))
        mixed = sums(inputs, self._weight)[piece.num_replays :]
        return mixed if self._bias is None else mixed + self._bias

    def describe(self) -> PartArgs | None:
        if self._conv.kernel > MOST_TAPS:
            return None
        (tails,) = self.states[0].pieces
        self._taps = self._weight[:, 0].mT.contiguous()  # [kernel, channels], as C reads them
        bias = None if self._bias is None else self._bias.data_ptr()
        sizes = (self._conv.kernel, tails.shape[1])
        self._args = ShortConvArgs(self._taps.data_ptr(), bias, *sizes)  # C keeps its address
        return describe_part("short_conv", (self._in.args, self._o.args), self._args)
