"""Recurrent state in the paged pool, as the Triton kernels see it.

A slot is some blocks; a piece of it is contiguous in one of them (pool/states.py). A program owns one piece, of a value head
and some of its columns, and as large a share of the projected rows' columns: of these it writes the convolution's tail, and
keeps the drafts. So nothing that one program writes is read by another of the same launch.

A projected row has the inputs of the convolution first; what stands before them is not given to the kernels. Engine thread.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from engine.runtime.kv_layout import DeviceState

# Tensors whose addresses change every step.
STEP_ARGS = ["read", "written", "starts", "begins", "num_kept", "replays", "rows", "slice_of"]


class Sizes(NamedTuple):
    """A layer's heads, the tokens that its convolution reads, and neighbouring value heads that share a key head.

    The rule is that of Gated DeltaNet, or of Mamba-2, whose B are the keys and C the queries, of groups instead of heads.
    """

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    kernel: int
    shared: int
    inputs: int = 0  # where in a row the convolution's inputs begin
    is_delta: bool = True

    @property
    def channels(self) -> int:
        """Return the width of queries, keys and values."""
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim


def shape_args(sizes: Sizes, state: DeviceState) -> dict[str, Any]:
    """Return what is constant in the kernels of a layer."""
    matrices, tails = state.spec.pieces
    return {
        "IS_DELTA": sizes.is_delta,
        "CHANNELS": sizes.channels,
        "FIRST": matrices.num,  # of the tail's pieces
        "HK": sizes.num_k_heads,
        "HV": sizes.num_v_heads,
        "K": sizes.k_dim,
        "V": sizes.v_dim,
        "KERNEL": sizes.kernel,
        "SHARED": sizes.shared,
        "COLUMNS": matrices.shape[1],
        "SEGMENT": tails.shape[1],
        "WIDTH": state.spec.row - sizes.inputs,
        "PITCH": state.spec.row,  # of the drafts' rows
    }


def state_args(state: DeviceState) -> dict[str, Any]:
    """Return the tensors of a layer's state and the step's slots; each view of the pool is in the type of its pieces."""
    matrices = state.pool.view(state.spec.pieces[0].dtype)
    return {"matrices": matrices, "matrix_stride": matrices.stride(0), **tail_args(state)}


def tail_args(state: DeviceState) -> dict[str, Any]:
    """Return those of the convolution alone, whose pieces are the last."""
    tails, step = state.pool.view(state.spec.pieces[-1].dtype), state.step
    return {
        "tails": tails,
        "places": state.places,
        "drafts": state.kept if state.kept.shape[1] else None,
        "read": step.read,
        "written": step.written,
        "starts": step.starts,
        "begins": step.begins,
        "num_kept": step.kept,
        "replays": step.replays,
        "rows": step.rows,
        "tail_stride": tails.stride(0),
        "draft_stride": state.kept.stride(0),
        "slot_width": step.read.shape[1],
    }


def program_args(sizes: Sizes, state: DeviceState) -> tuple[int, dict[str, int]]:
    """Return the programs of a slice, one a piece, and the sizes of their blocks."""
    num = state.spec.pieces[0].num
    share = triton.cdiv(state.spec.row - sizes.inputs, num)
    return num, {
        "BLOCK_K": max(triton.next_power_of_2(sizes.k_dim), 16),  # the least that a product takes
        "BLOCK_C": max(triton.next_power_of_2(state.spec.pieces[0].shape[1]), 16),
        "SHARE": share,
        "BLOCK_S": triton.next_power_of_2(share),
    }


@triton.jit
def locate_tails(
    tails, places, slots, index, column, slot_width, stride, FIRST: tl.constexpr, SEGMENT: tl.constexpr, mask
):
    """Return the first token's number of the convolution's tail of channels, and whether slices have one."""
    piece = places + 2 * (FIRST + column // SEGMENT)
    part, offset = tl.load(piece, mask=mask, other=0), tl.load(piece + 1, mask=mask, other=0)
    is_there = mask & (tl.load(slots + index * slot_width) >= 0)  # of a slot that is none, other entries are undefined
    block = tl.load(slots + index * slot_width + part, mask=is_there, other=0)
    item: tl.constexpr = tails.dtype.element_ty.primitive_bitwidth // 8
    return block.to(tl.int64) * stride + offset // item + column % SEGMENT, is_there


@triton.jit
def locate_matrix(matrices, places, slots, index, piece, slot_width, stride):
    """Return the first number of a piece in a slice's slot, and whether the slot is one."""
    part, offset = tl.load(places + 2 * piece), tl.load(places + 2 * piece + 1)
    block = tl.load(slots + index * slot_width + part)
    item: tl.constexpr = matrices.dtype.element_ty.primitive_bitwidth // 8
    first = block.to(tl.int64) * stride + tl.multiple_of(offset // item, 16)
    return matrices + first, tl.load(slots + index * slot_width) >= 0


@triton.jit
def load_raw(
    x,
    drafts,
    tails,
    places,
    read,
    index,
    row,
    own,
    at,
    replays,
    column,
    mask,
    x_stride,
    draft_stride,
    tail_stride,
    slot_width,
    CHANNELS: tl.constexpr,
    PITCH: tl.constexpr,
    FIRST: tl.constexpr,
    SEGMENT: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """Return projected numbers of slices by place `at` from their first virtual rows, which may be before these.

    Slices `index`, places and columns are broadcast together. `own` are the slices' first rows in x, `row` their runner
    rows.
    """
    value = tl.load(x + (own + at - replays).to(tl.int64) * x_stride + column, mask=mask & (at >= replays), other=0.0)
    if drafts is not None:
        kept = drafts + row.to(tl.int64) * draft_stride + at * PITCH + column
        value = tl.where(at >= replays, value, tl.load(kept, mask=mask & (at >= 0) & (at < replays), other=0.0))
    is_before = mask & (at < 0) & (column < CHANNELS)
    first, is_there = locate_tails(
        tails, places, read, index, column, slot_width, tail_stride, FIRST, SEGMENT, is_before
    )
    tail = tl.load(tails + first + (KERNEL - 1 + at) * SEGMENT, mask=is_there, other=0.0)
    return tl.where(at >= 0, value, tail)


@triton.jit
def leave_rows(
    x,
    drafts,
    tails,
    places,
    read,
    written,
    index,
    row,
    own,
    num_own,
    num_kept,
    replays,
    share,
    x_stride,
    draft_stride,
    tail_stride,
    slot_width,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PITCH: tl.constexpr,
    FIRST: tl.constexpr,
    SEGMENT: tl.constexpr,
    KERNEL: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Write a slice's tail, in place or not, and keep its drafts; of one share of the columns."""
    at = tl.arange(0, BLOCK_S)
    column = share * SHARE + at
    inside = (at < SHARE) & (column < WIDTH)
    is_channel = inside & (column < CHANNELS)
    is_moved = tl.load(read + index * slot_width) != tl.load(written + index * slot_width)
    first, is_there = locate_tails(
        tails, places, written, index, column, slot_width, tail_stride, FIRST, SEGMENT, is_channel
    )
    for tap in tl.static_range(KERNEL - 1):  # a tail in place moves to the front: no tap is read after it is written
        raw = load_raw(
            x, drafts, tails, places, read, index, row, own, replays + num_kept - (KERNEL - 1) + tap, replays, column,
            is_channel, x_stride, draft_stride, tail_stride, slot_width, CHANNELS, PITCH, FIRST, SEGMENT, KERNEL,
        )  # fmt: skip
        tl.store(tails + first + tap * SEGMENT, raw, mask=is_there)
    if drafts is not None:
        tl.debug_barrier()
        first, is_there = locate_tails(
            tails, places, read, index, column, slot_width, tail_stride, FIRST, SEGMENT, is_channel
        )
        is_there = is_there & is_moved & (replays > 0)  # what it has read becomes a snapshot of where its rows begin
        for tap in tl.static_range(KERNEL - 1):
            raw = load_raw(
                x, drafts, tails, places, read, index, row, own, replays - (KERNEL - 1) + tap, replays, column,
                is_there, x_stride, draft_stride, tail_stride, slot_width, CHANNELS, PITCH, FIRST, SEGMENT, KERNEL,
            )  # fmt: skip
            tl.store(tails + first + tap * SEGMENT, raw, mask=is_there)
        tl.debug_barrier()  # replays were read where the drafts go
        for draft in range(num_own - num_kept):
            raw = tl.load(x + (own + num_kept + draft).to(tl.int64) * x_stride + column, mask=inside)
            tl.store(drafts + row.to(tl.int64) * draft_stride + draft * PITCH + column, raw, mask=inside)
