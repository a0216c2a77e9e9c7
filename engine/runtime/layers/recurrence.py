"""The state of layers with a matrix for each head and a convolution, and how tokens change it, one by one, in torch.

recurrence.c has the same for the rules that the native library knows, convolve.h for the convolution along the tokens of a
sequence, each channel alone, whose last inputs are part of the state. Engine thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from ctypes import Structure

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

from engine.runtime.kv_layout import Pieces, RecurrentSpec
from engine.runtime.layers.parts import Maker, RecurrentState, Slice
from engine.runtime.native.library import DTYPES
from engine.runtime.native.structs import mirror

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


_COLUMNS = 32  # of a head's matrix in one piece, which stays in the nearest cache while all tokens of a slice change it
_MOST_ROWS = 1024  # of a matrix, of which C keeps a piece on the stack

# All heads' matrices [heads, k, v], and the index of a token -> the next matrices, and the token's output [heads, v].
Rule = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def matrix_state(
    make: Maker, num_heads: int, k_dim: int, v_dim: int, channels: int, kernel: int, row: int
) -> RecurrentSpec:
    """Return the pieces of a layer's state: columns of matrices [k_dim, v_dim], and the convolution's last inputs."""
    columns = math.gcd(_COLUMNS, v_dim)
    matrices = Pieces(num_heads * v_dim // columns, (k_dim, columns), make.state_dtype)
    tails = tail_pieces(channels, kernel, make.dtype)
    return RecurrentSpec((matrices, tails), row=row, dtype=make.dtype)


@mirror("recurrence")
class RecurrenceArgs(Structure):
    """The sizes of a layer's matrices, and its convolution."""


def recurrence_args(
    spec: RecurrentSpec, taps: Tensor, bias: Tensor | None, *, num_heads: int, num_k_heads: int, shared: int
) -> RecurrenceArgs | None:
    """Describe a state and a convolution, taps [kernel, channels], to the native library; None if they are too large.

    Head h goes with the keys of head h / shared % num_k_heads. C keeps the addresses.
    """
    matrices, tails = spec.pieces
    if len(taps) > MOST_TAPS or matrices.shape[0] > _MOST_ROWS:
        return None
    assert taps.is_contiguous()
    kernel, channels = taps.shape
    k_dim, columns = matrices.shape
    return RecurrenceArgs(
        taps.data_ptr(), None if bias is None else bias.data_ptr(), num_heads, num_k_heads, k_dim,
        matrices.num * columns // num_heads, columns, channels, kernel, tails.shape[1], shared, DTYPES[matrices.dtype],
    )  # fmt: skip


def convolved(raw: Tensor, taps: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return float32 SiLU of a convolution [T, channels]; raw [T + kernel - 1, channels], taps [channels, 1, kernel]."""
    mixed = sums(raw, taps)
    return F.silu(mixed if bias is None else mixed + bias)


def advance(
    state: RecurrentState,
    index: int,
    piece: Slice,
    rows: Tensor,
    *,
    num_heads: int,
    channels: slice,
    prepare: Callable[[Tensor, Tensor], Rule],
) -> Tensor:
    """Return the outputs [T, heads, v] of a slice's rows, and write what it leaves.

    `channels` of a row enter the convolution. `prepare` gets the rows, of replays too, and those channels, with the
    inputs before the slice.
    """
    num_replays = piece.num_replays
    matrices, tails = state.read(index)
    rows = tokens_of(state, index, piece, rows)
    num_written = len(rows) - piece.num_drafts
    raw = behind_tail(tails, rows[:, channels])
    rule, outputs = prepare(rows, raw), list[Tensor]()
    s = matrices.unflatten(0, (num_heads, -1)).transpose(1, 2).flatten(2).float()  # [heads, k, v]

    def leave(num: int, *, midway: bool = False) -> None:
        pieces = s.to(matrices.dtype).unflatten(2, (-1, matrices.shape[2])).transpose(1, 2).flatten(0, 1)
        state.write(index, (pieces, tail_after(raw, num, tails)), midway=midway)

    for t in range(len(rows)):
        s, output = rule(s, t)
        outputs.append(output)
        s = s.to(matrices.dtype).float()  # after every token, so that no cut shows
        if t + 1 == piece.midway_after:
            leave(t + 1, midway=True)
        if t + 1 == num_written:
            leave(num_written)
    return torch.stack(outputs[num_replays:])
