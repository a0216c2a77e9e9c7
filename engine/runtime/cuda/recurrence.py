"""Gated DeltaNet and Mamba-2 between their two products: convolution and gates, the rule, and the norm.

The rule is computed token by token for decodes, drafts and short chunks, and in chunks (recurrence_chunks.py) for prompts. A
step's *virtual rows* are the slices' own rows, those of each slice behind the accepted drafts of the step before. The
convolution reads the tokens before them from the slot that the slice reads; only later launches write to the pool. A slice
without a slot pads the batch of a graph, and has no effect.

layers/delta.py and layers/mamba.py are the definitions. Sums are in float32. Engine thread; nothing waits for the device.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.runtime.cuda.recurrence_chunks import compute_chunks
from engine.runtime.cuda.recurrence_state import (
    STEP_ARGS,
    Sizes,
    leave_rows,
    load_raw,
    locate_matrix,
    program_args,
    shape_args,
    state_args,
)
from engine.runtime.kv_layout import DeviceState

_ROWS = 16  # of a program of the convolution, in a step with prompts
_NORM_COLUMNS = 512  # of a warp of the norm


class Weights(NamedTuple):
    """The small tensors of a layer, float32; the last ones are Mamba-2's."""

    conv: Tensor  # [channels, 1, kernel]
    decay: Tensor  # [value heads], -exp(A_log)
    bias: Tensor  # [value heads], of the steps
    conv_bias: Tensor | None = None  # [channels]
    skip: Tensor | None = None  # [value heads], D
    step_limit: tuple[float, float] = (0.0, math.inf)


def advance(x: Tensor, state: DeviceState, sizes: Sizes, weights: Weights) -> Tensor:
    """Return float32 outputs [T, num_v_heads, v_dim] of projected rows x [T, width], and advance the states."""
    assert x.stride(1) == 1
    assert weights.conv.is_contiguous()
    step, num_v_heads = state.step, sizes.num_v_heads
    x, state = x[:, sizes.inputs :], state._replace(kept=state.kept[:, :, sizes.inputs :])
    shared = {"x": x, "x_stride": x.stride(0), **state_args(state), **shape_args(sizes, state)}
    mixed, gates = _mix(shared, state, sizes, weights)
    out = torch.empty((len(x), num_v_heads, sizes.v_dim), dtype=torch.float32, device=x.device)
    num_programs, blocks = program_args(sizes, state)
    shared |= {"mixed": mixed, "gates": gates, "skip": weights.skip, "out": out} | blocks
    if len(step.by_token):
        _advance_rows[(len(step.by_token), num_programs)](**shared, slices=step.by_token, num_warps=4)
    if len(step.prompts):
        compute_chunks(shared, sizes, step, num_programs)
    return out


def gated_norm(out: Tensor, z: Tensor, weight: Tensor, sizes: Sizes, eps: float) -> Tensor:
    """Return [T, width] in z's type: the norms of `advance`'s outputs, with gates silu(z), z [T, width].

    Gated DeltaNet normalises each head, by weights [v_dim], before the gate; Mamba-2 each group's heads, by weights [width],
    behind it.
    """
    assert z.stride(1) == 1
    num_groups = sizes.num_v_heads if sizes.is_delta else sizes.num_k_heads
    normed = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    width = z.shape[1] // num_groups
    block = triton.next_power_of_2(width)
    num_warps = min(max(block // _NORM_COLUMNS, 1), 16)
    _norm_rows[(len(z), num_groups)](
        out, z, weight, normed, z.stride(0), eps, sizes.is_delta, width, block, num_warps=num_warps
    )
    return normed


def _mix(shared: dict[str, Any], state: DeviceState, sizes: Sizes, weights: Weights) -> tuple[Tensor, Tensor]:
    """Return float32 channels [V, channels] and gates [V, 2, num_v_heads] of the virtual rows.

    Channels are queries, keys and values; the delta rule's queries and keys are of length 1, but for the scale of queries.
    Gates are logarithms of decays, and rates.
    """
    num_rows, device = len(state.step.slice_of), weights.conv.device
    mixed = torch.empty((num_rows, sizes.channels), dtype=torch.float32, device=device)
    gates = torch.empty((num_rows, 2, sizes.num_v_heads), dtype=torch.float32, device=device)
    rows = _ROWS if len(state.step.prompts) else 1
    _mix_rows[(triton.cdiv(num_rows, rows), 2 * sizes.num_k_heads + sizes.num_v_heads + 1)](
        **shared,
        mixed=mixed,
        gates=gates,
        weight=weights.conv,
        conv_bias=weights.conv_bias,
        decay=weights.decay,
        bias=weights.bias,
        slice_of=state.step.slice_of,
        num_rows=num_rows,
        scale=sizes.k_dim**-0.5,
        min_step=weights.step_limit[0],
        max_step=weights.step_limit[1],
        BLOCK_T=rows,
        BLOCK_D=triton.next_power_of_2(max(sizes.k_dim, sizes.v_dim)),
        BLOCK_H=triton.next_power_of_2(sizes.num_v_heads),
        num_warps=1 if rows == 1 else 4,
    )
    return mixed, gates


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)), exact for small results too, which a logarithm of 1 + y is not."""
    y = tl.exp(-tl.abs(x))
    z = y / (2.0 + y)  # log(1 + y) = 2 atanh(z), z <= 1/3
    square, total = z * z, tl.zeros_like(z)
    for power in tl.static_range(17, 0, -2):
        total = total * square + 1.0 / power
    return tl.maximum(x, 0.0) + 2.0 * z * total


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=[*STEP_ARGS, "slice_of"])
def _mix_rows(
    x,
    mixed,
    gates,
    weight,
    conv_bias,
    decay,
    bias,
    matrices,
    tails,
    places,
    drafts,
    slice_of,
    read,
    written,
    starts,
    begins,
    num_kept,
    replays,
    rows,
    matrix_stride,
    tail_stride,
    draft_stride,
    slot_width,
    x_stride,
    num_rows,
    scale,
    min_step,
    max_step,
    IS_DELTA: tl.constexpr,
    CHANNELS: tl.constexpr,
    FIRST: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KERNEL: tl.constexpr,
    SHARED: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEGMENT: tl.constexpr,
    WIDTH: tl.constexpr,
    PITCH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program for one head of some virtual rows; those of the last "head" compute gates."""
    head = tl.program_id(1)
    virtual = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    inside = virtual < num_rows
    index = tl.load(slice_of + virtual, mask=inside, other=0)
    inside = inside & (tl.load(written + index * slot_width) >= 0)
    at, replayed = virtual - tl.load(begins + index), tl.load(replays + index)
    own, row = tl.load(starts + index), tl.load(rows + index)
    to = virtual.to(tl.int64)
    if head == 2 * HK + HV:
        heads = tl.arange(0, BLOCK_H)[None, :]
        is_gate = inside & (heads < HV)
        gate = WIDTH - HV + heads
        step = load_raw(
            x, drafts, tails, places, read, index, row, own, at, replayed, gate, is_gate, x_stride, draft_stride, tail_stride,
            slot_width, CHANNELS, PITCH, FIRST, SEGMENT, KERNEL,
        )  # fmt: skip
        step = _softplus(step.to(tl.float32) + tl.load(bias + heads, mask=heads < HV, other=0.0))
        if IS_DELTA:
            rate = load_raw(
                x, drafts, tails, places, read, index, row, own, at, replayed, gate - HV, is_gate, x_stride, draft_stride,
                tail_stride, slot_width, CHANNELS, PITCH, FIRST, SEGMENT, KERNEL,
            )  # fmt: skip
            rate = tl.sigmoid(rate.to(tl.float32))
        else:
            step = tl.where(step < min_step, min_step, tl.where(step > max_step, max_step, step))  # NaN stays
            rate = step
        factor = tl.load(decay + heads, mask=heads < HV, other=0.0)
        tl.store(gates + to * 2 * HV + heads, factor * step, mask=is_gate)
        tl.store(gates + to * 2 * HV + HV + heads, rate, mask=is_gate)
    else:
        is_key = head < 2 * HK
        dims = tl.arange(0, BLOCK_D)[None, :]
        is_dim = dims < tl.where(is_key, K, V)
        mask, value = inside & is_dim, head - 2 * HK
        channel = tl.where(is_key, head * K, 2 * HK * K + value * V) + dims
        if IS_DELTA:
            column = channel
        else:  # values, keys, queries
            column = tl.where(is_key, HV * V + (head + tl.where(head < HK, HK, -HK)) * K, value * V) + dims
        total = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        for tap in tl.static_range(KERNEL):
            raw = load_raw(
                x, drafts, tails, places, read, index, row, own, at - (KERNEL - 1) + tap, replayed, column, mask, x_stride,
                draft_stride, tail_stride, slot_width, CHANNELS, PITCH, FIRST, SEGMENT, KERNEL,
            )  # fmt: skip
            total += raw.to(tl.float32) * tl.load(weight + column * KERNEL + tap, mask=is_dim, other=0.0)
        if conv_bias is not None:
            total += tl.load(conv_bias + column, mask=is_dim, other=0.0)
        total = total * tl.sigmoid(total)
        if IS_DELTA and is_key:
            total = total / tl.sqrt_rn(tl.sum(total * total, 1) + 1e-6)[:, None] * tl.where(head < HK, scale, 1.0)
        tl.store(mixed + to * CHANNELS + channel, total, mask=mask)


@triton.jit(do_not_specialize_on_alignment=[*STEP_ARGS, "slices"])
def _advance_rows(
    x,
    mixed,
    gates,
    skip,
    out,
    matrices,
    tails,
    places,
    drafts,
    slices,
    read,
    written,
    starts,
    begins,
    num_kept,
    replays,
    rows,
    matrix_stride,
    tail_stride,
    draft_stride,
    slot_width,
    x_stride,
    IS_DELTA: tl.constexpr,
    CHANNELS: tl.constexpr,
    FIRST: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KERNEL: tl.constexpr,
    SHARED: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEGMENT: tl.constexpr,
    WIDTH: tl.constexpr,
    PITCH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One program for one piece of a slice's state, token by token."""
    index, piece = tl.load(slices + tl.program_id(0)), tl.program_id(1)
    if tl.load(written + index * slot_width) < 0:  # a padding row of a captured graph
        return
    head = piece // (V // COLUMNS)
    dims, columns = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_C)
    is_dim, is_column = dims < K, columns < COLUMNS
    at, mask = dims[:, None] * COLUMNS + columns[None, :], is_dim[:, None] & is_column[None, :]
    came_from, is_there = locate_matrix(matrices, places, read, index, piece, slot_width, matrix_stride)
    goes_to, _ = locate_matrix(matrices, places, written, index, piece, slot_width, matrix_stride)
    s = tl.load(came_from + at, mask=mask & is_there, other=0.0).to(tl.float32)
    begin, own, replayed = tl.load(begins + index), tl.load(starts + index), tl.load(replays + index)
    num_rows, kept = tl.load(begins + index + 1) - begin, tl.load(num_kept + index)
    is_moved = tl.load(read + index * slot_width) != tl.load(written + index * slot_width)
    q_at = mixed + head // SHARED % HK * K + dims
    v_at = mixed + 2 * HK * K + piece * COLUMNS + columns
    out_at = out + piece * COLUMNS + columns
    for token in range(num_rows):
        virtual = (begin + token).to(tl.int64)
        q = tl.load(q_at + virtual * CHANNELS, mask=is_dim, other=0.0)
        k = tl.load(q_at + HK * K + virtual * CHANNELS, mask=is_dim, other=0.0)
        v = tl.load(v_at + virtual * CHANNELS, mask=is_column, other=0.0)
        gate = gates + virtual * 2 * HV + head
        s *= tl.exp(tl.load(gate))
        if IS_DELTA:
            v -= tl.sum(s * k[:, None], 0)
        s += k[:, None] * (v * tl.load(gate + HV))[None, :]
        o = tl.sum(s * q[:, None], 0)
        if skip is not None:
            o += v * tl.load(skip + head)
        to = (own + token - replayed).to(tl.int64)
        tl.store(out_at + to * HV * V, o, mask=is_column & (token >= replayed))
        s = s.to(matrices.dtype.element_ty).to(tl.float32)  # after every token, so that no cut shows
        if token + 1 == replayed:
            tl.store(came_from + at, s, mask=mask & is_there & is_moved)
        if token + 1 == replayed + kept:
            tl.store(goes_to + at, s, mask=mask)
    leave_rows(
        x, drafts, tails, places, read, written, index, tl.load(rows + index), own, num_rows - replayed, kept, replayed,
        piece, x_stride, draft_stride, tail_stride, slot_width, CHANNELS, WIDTH, PITCH, FIRST, SEGMENT, KERNEL, SHARE, BLOCK_S,
    )  # fmt: skip


@triton.jit
def _norm_rows(out, z, weight, normed, z_stride, eps, IS_DELTA: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program for one group of a row."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = (row * tl.num_programs(1) + group) * WIDTH + columns
    o = tl.load(out + at, mask=inside, other=0.0)
    gate = tl.load(z + row * z_stride + group * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    gate *= tl.sigmoid(gate)
    if IS_DELTA:
        factors = tl.load(weight + columns, mask=inside, other=0.0) * gate
    else:
        o *= gate
        factors = tl.load(weight + group * WIDTH + columns, mask=inside, other=0.0)
    o *= factors * (1.0 / tl.sqrt_rn(tl.sum(o * o, 0) / WIDTH + eps))
    tl.store(normed + at, o, mask=inside)
