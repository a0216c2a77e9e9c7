"""A convolution along the tokens of a sequence, each channel alone: the last inputs are part of a recurrent state.

The operations here define it in torch; convolve.h has the same. Engine thread.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.runtime.kv_layout import Pieces
from engine.runtime.layers.parts import RecurrentState, Slice

MOST_TAPS = 8  # as in convolve.h
_SEGMENT = 64  # channels of one piece of the state


def tail_pieces(channels: int, kernel: int, dtype: torch.dtype) -> Pieces:
    """Return the pieces of a state that hold the last inputs."""
    segment = math.gcd(_SEGMENT, channels)
    return Pieces(channels // segment, (kernel - 1, segment), dtype)


def tokens_of(state: RecurrentState, index: int, piece: Slice, rows: Tensor) -> Tensor:
    """Return the rows of a slice behind those of its replays; keep the rows of its drafts."""
    if piece.num_replays:
        rows = torch.cat((state.drafts(index)[: piece.num_replays], rows))
    if piece.num_drafts:
        state.drafts(index)[: piece.num_drafts] = rows[-piece.num_drafts :]
    return rows


def behind_tail(tail: Tensor, inputs: Tensor) -> Tensor:
    """Return the inputs [T, channels] of a slice behind those of the tokens before it."""
    return torch.cat((tail.transpose(0, 1).flatten(1), inputs))


def tail_after(inputs: Tensor, num: int, tail: Tensor) -> Tensor:
    """Return the tail after so many tokens of a slice, as pieces; `inputs` are those of `behind_tail`."""
    return inputs[num : num + tail.shape[1]].unflatten(1, (-1, tail.shape[2])).transpose(0, 1)


def sums(inputs: Tensor, weight: Tensor) -> Tensor:
    """Return the float32 sums [T, channels] over the taps [channels, 1, kernel] of a weight."""
    return torch.einsum("tck,ck->tc", inputs.float().unfold(0, weight.shape[2], 1), weight[:, 0])
