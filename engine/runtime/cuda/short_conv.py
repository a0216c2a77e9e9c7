"""LFM2's convolution between its two products, with the gate behind it, in two launches.

The first reads the tokens before a step's rows from the slots that the slices read, and the second writes to the pool. A
slice without a slot pads the batch of a graph, and has no effect. layers/short_conv.py is the definition. Sums are in
float32. Engine thread; nothing waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.runtime.cuda.recurrence_state import STEP_ARGS, leave_rows, load_raw, tail_args
from engine.runtime.kv_layout import DeviceState

_ROWS = 16  # of a program, in a step with prompts
_CHANNELS = 128


def convolve(x: Tensor, gate: Tensor, state: DeviceState, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return gate * (convolution of x) [T, channels], and advance the states; `gate` may have wider rows."""
    assert x.is_contiguous()
    assert weight.is_contiguous()
    channels, (tails,), step = x.shape[1], state.spec.pieces, state.step
    num_rows, out = len(step.slice_of), torch.empty_like(x)
    shared = tail_args(state) | {"x": x, "x_stride": channels, "CHANNELS": channels}
    shared |= {"KERNEL": weight.shape[2], "SEGMENT": tails.shape[1]}
    rows = _ROWS if len(step.prompts) else 1
    block = min(triton.next_power_of_2(channels), _CHANNELS)
    grid = triton.cdiv(num_rows, rows), triton.cdiv(channels, block)
    _convolve_rows[grid](
        gate=gate,
        weight=weight,
        bias=bias,
        out=out,
        slice_of=step.slice_of,
        gate_stride=gate.stride(0),
        num_rows=num_rows,
        BLOCK_T=rows,
        BLOCK_C=block,
        **shared,
    )
    _leave[(len(step.rows), grid[1])](BLOCK_C=block, **shared)
    return out


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=[*STEP_ARGS, "slice_of"])
def _convolve_rows(
    x,
    gate,
    weight,
    bias,
    out,
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
    tail_stride,
    draft_stride,
    slot_width,
    x_stride,
    gate_stride,
    num_rows,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program for some channels of some virtual rows, of which replays have no result."""
    virtual = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    inside, is_channel = virtual < num_rows, column < CHANNELS
    index = tl.load(slice_of + virtual, mask=inside, other=0)
    at, replayed = virtual - tl.load(begins + index), tl.load(replays + index)
    own, row = tl.load(starts + index), tl.load(rows + index)
    mask = inside & is_channel & (at >= replayed) & (tl.load(written + index * slot_width) >= 0)
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for tap in tl.static_range(KERNEL):
        raw = load_raw(
            x, drafts, tails, places, read, index, row, own, at - (KERNEL - 1) + tap, replayed, column, mask, x_stride,
            draft_stride, tail_stride, slot_width, CHANNELS, CHANNELS, 0, SEGMENT, KERNEL,
        )  # fmt: skip
        total += raw.to(tl.float32) * tl.load(weight + column * KERNEL + tap, mask=is_channel, other=0.0)
    if bias is not None:
        total += tl.load(bias + column, mask=is_channel, other=0.0)
    to = (own + at - replayed).to(tl.int64)
    total *= tl.load(gate + to * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + to * CHANNELS + column, total, mask=mask)


@triton.jit(do_not_specialize_on_alignment=STEP_ARGS)
def _leave(
    x,
    tails,
    places,
    drafts,
    read,
    written,
    starts,
    begins,
    num_kept,
    replays,
    rows,
    tail_stride,
    draft_stride,
    slot_width,
    x_stride,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program for some channels of a slice: its tail, and its drafts."""
    index = tl.program_id(0)
    if tl.load(written + index * slot_width) < 0:  # a padding row of a captured graph
        return
    own, replayed = tl.load(starts + index), tl.load(replays + index)
    leave_rows(
        x, drafts, tails, places, read, written, index, tl.load(rows + index), own, tl.load(starts + index + 1) - own,
        tl.load(num_kept + index), replayed, tl.program_id(1), x_stride, draft_stride, tail_stride, slot_width, CHANNELS,
        CHANNELS, CHANNELS, 0, SEGMENT, KERNEL, BLOCK_C, BLOCK_C,
    )  # fmt: skip
