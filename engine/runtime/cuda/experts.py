"""The experts of a mixture: two products over pairs sorted by expert, and their weighted sum.

A program multiplies a tile of one expert's pairs by some rows of the expert's matrix, so a matrix is read once for a
tile. The first product gathers the tokens' rows, and applies the activation, with gates or without; the last launch adds up
each token's experts. All shapes follow from the number of tokens, and nothing is read back to the host, so a CUDA graph can hold all
of it. Sums are float32. Engine thread.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.runtime.activation import Activation, Clamp
from engine.runtime.cuda.activation import NAMES, share_of
from engine.runtime.cuda.attention_tile import PRECISION
from engine.runtime.cuda.packed import Rows, block_of, load_weights, scale_rows
from engine.runtime.cuda.routing import Order

_NAMES = {**NAMES, Activation.RELU2: "relu2"}
_NO_CLAMP = Clamp(0.0, 0.0)
_BLOCK = 1024  # columns that a program of the sum adds up


class ExpertTile(NamedTuple):
    """Sizes of a program's product, and its resources."""

    rows: int  # pairs
    outputs: int  # of a matrix; twice as many rows are read for gates and ups
    inputs: int  # at a time
    warps: int
    stages: int


def choose_tile(num_pairs: int, stack: Rows, itemsize: int, *, is_gated: bool) -> ExpertTile:
    """Return the tile for so many pairs of all experts; inputs are of `itemsize`.

    Few pairs an expert leave a product bound by reading matrices: few rows, and many bytes on their way. The sizes fit
    99 KiB of shared memory, and have not been measured on a GPU.
    """
    num_experts, wide = len(stack.numbers), 64 if itemsize == 2 else 32
    if stack.kind == "float":
        inputs = next((size for size in (2 * wide, wide, wide // 2) if stack.num_inputs % size == 0), wide)
    else:
        inputs = block_of(stack, 2 * wide)
    if num_pairs <= 16 * num_experts:
        return ExpertTile(16, 32 if is_gated else 64, inputs, 4, 4 if itemsize == 2 else 3)
    inputs = min(inputs, wide)
    if num_pairs <= 64 * num_experts:
        return ExpertTile(32 if itemsize == 4 else 64, 32 if is_gated else 64, inputs, 4, 3)
    return ExpertTile(64 if itemsize == 4 else 128, 64 if is_gated else 128, inputs, 8, 3)


def choose_dense_tile(rows: Rows, num_rows: int, itemsize: int) -> ExpertTile:
    """Return the tile for few rows of x and a single matrix of codes.

    Programs are many and small, so that a matrix of 4096 outputs keeps every multiprocessor busy.
    """
    is_small = len(rows.numbers) <= 4096
    wide = 128 if itemsize == 2 else 64
    held = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    return ExpertTile(held, 16 if is_small else 32, block_of(rows, wide), 2 if is_small else 4, 4)


def gate_and_up(
    x: Tensor, stack: Rows, order: Order, num_chosen: int, activation: Activation | Clamp, tile: ExpertTile
) -> Tensor:
    """Return activation(gates x) * ups x, or activation(ups x), of sorted pairs [pairs, width] in x's type.

    x [T, inputs]; the matrices have gates, if the activation is of gates, then as many ups.
    """
    clamp = activation if isinstance(activation, Clamp) else _NO_CLAMP
    name = "clamped" if isinstance(activation, Clamp) else _NAMES[activation]
    width = stack.numbers.shape[1] // (1 + activation.is_gated)
    out = torch.empty((order.pairs.shape[0], width), dtype=x.dtype, device=x.device)
    multiply(x, stack, out, tile, order, num_chosen, name, clamp)
    return out


def down(x: Tensor, stack: Rows, order: Order, tile: ExpertTile) -> Tensor:
    """Return float32 products [pairs, outputs] of sorted x [pairs, inputs]."""
    out = torch.empty((x.shape[0], stack.numbers.shape[1]), dtype=torch.float32, device=x.device)
    multiply(x, stack, out, tile, order)
    return out


def combine(
    parts: Tensor,
    order: Order,
    weights: Tensor,
    dtype: torch.dtype,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum [T, width] of each token's sorted parts [pairs, width], in `dtype`.

    `shared` [T, width] float32 is added, times the sigmoid of `shared_gate` [T, 1] float32 if given.
    """
    num_tokens, num_chosen = weights.shape
    width = parts.shape[1]
    out = torch.empty((num_tokens, width), dtype=dtype, device=parts.device)
    assert shared is None or shared.is_contiguous()
    if num_tokens:
        _combine_kernel[(num_tokens, triton.cdiv(width, _BLOCK))](
            parts,
            order.places,
            weights,
            shared,
            shared_gate,
            out,
            width,
            NUM_CHOSEN=num_chosen,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return out


def multiply(
    x: Tensor,
    rows: Rows,
    out: Tensor,
    tile: ExpertTile,
    order: Order | None = None,
    num_chosen: int = 1,
    activation: str = "",
    clamp: Clamp = _NO_CLAMP,
) -> None:
    """Write a product to `out`. Without an order there is one matrix; without an activation x is sorted."""
    assert rows.numbers.is_contiguous()
    assert x.stride(1) == 1
    assert x.shape[1] == rows.num_inputs
    assert order is None or tile.rows == order.rows
    num_tiles = triton.cdiv(len(x), tile.rows) if order is None else order.tiles.shape[0]
    if num_tiles == 0:
        return
    # Tiles of one expert are neighbours in the first dimension, so they run together and share what L2 has of a matrix.
    _expert_kernel[(num_tiles, triton.cdiv(out.shape[1], tile.outputs))](
        x,
        rows.numbers,
        rows.scales,
        rows.zeros,
        rows.bias,
        out,
        *((None, None, None) if order is None else (order.pairs, order.tiles, order.num_tiles)),
        len(x),
        x.stride(0),
        clamp.alpha,
        clamp.limit,
        NUM_CHOSEN=num_chosen,
        OUTPUTS=out.shape[1],
        INPUTS=x.shape[1],
        NUM_GROUPS=rows.num_groups,
        GROUP=rows.group,
        ZERO=rows.zero,
        KIND=rows.kind,
        ACTIVATION=activation,
        IS_GATED=activation not in ("", "relu2"),
        BLOCK_M=tile.rows,
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@triton.jit
def _load(tensor, rows, start, INPUTS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return columns from `start` on of rows that begin at `rows`; zeros after INPUTS."""
    at = start + tl.arange(0, BLOCK_K)
    if INPUTS % BLOCK_K == 0:
        tile = tl.load(tensor + rows[:, None] + at[None, :])
    else:
        tile = tl.load(tensor + rows[:, None] + at[None, :], mask=(at < INPUTS)[None, :], other=0.0)
    return tile


@triton.jit
def _activate(gates, ups, alpha, limit, ACTIVATION: tl.constexpr):
    """Return the activation of float32 gates times ups."""
    if ACTIVATION == "clamped":
        gates = tl.where(gates > limit, limit, gates)  # NaN stays
        ups = tl.where(ups > limit, limit, tl.where(ups < -limit, -limit, ups))
        inner = (ups + 1.0) * gates * tl.sigmoid(alpha * gates)
    else:
        inner = gates * share_of(gates, ACTIVATION) * ups
    return inner


@triton.jit(do_not_specialize=["num_rows"])
def _expert_kernel(
    x_ptr,
    numbers_ptr,  # of each expert OUTPUTS rows, or gates and as many ups
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,  # [pairs, OUTPUTS], sorted
    pairs_ptr,
    tiles_ptr,
    num_tiles_ptr,
    num_rows,  # without tiles
    x_stride,
    alpha,
    limit,
    NUM_CHOSEN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    KIND: tl.constexpr,
    ACTIVATION: tl.constexpr,  # "": x is sorted
    IS_GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program for a tile of pairs and some outputs."""
    tile = tl.program_id(0)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(outputs, OUTPUTS - 1).to(tl.int64)
    if tiles_ptr is None:
        first, end = tile * BLOCK_M, num_rows
    else:
        if tile >= tl.load(num_tiles_ptr):
            return
        first, end = tl.load(tiles_ptr + 3 * tile + 1), tl.load(tiles_ptr + 3 * tile + 2)
        rows += tl.load(tiles_ptr + 3 * tile).to(tl.int64) * (2 * OUTPUTS if IS_GATED else OUTPUTS)
    places = first + tl.arange(0, BLOCK_M)
    # Rows after the end repeat the last one, which is cheaper than a mask.
    from_rows = tl.minimum(places, end - 1)
    if ACTIVATION != "":
        from_rows = tl.load(pairs_ptr + from_rows) // NUM_CHOSEN
    x_at = from_rows.to(tl.int64) * x_stride
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    ups = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        x = _load(x_ptr, x_at, start, INPUTS, BLOCK_K)
        weight = load_weights(
            numbers_ptr, scales_ptr, zeros_ptr, rows, start, x.dtype, INPUTS, NUM_GROUPS, GROUP, ZERO, KIND, BLOCK_K
        )
        acc = tl.dot(x, tl.trans(weight), acc, input_precision=PRECISION)
        if IS_GATED:
            weight = load_weights(
                numbers_ptr, scales_ptr, zeros_ptr, rows + OUTPUTS, start, x.dtype,
                INPUTS, NUM_GROUPS, GROUP, ZERO, KIND, BLOCK_K,
            )  # fmt: skip
            ups = tl.dot(x, tl.trans(weight), ups, input_precision=PRECISION)
    acc = scale_rows(acc, scales_ptr, rows, NUM_GROUPS)
    if IS_GATED:
        ups = scale_rows(ups, scales_ptr, rows + OUTPUTS, NUM_GROUPS)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + rows).to(tl.float32)[None, :]
        if IS_GATED:
            ups += tl.load(bias_ptr + rows + OUTPUTS).to(tl.float32)[None, :]
    if IS_GATED:
        acc = _activate(acc, ups, alpha, limit, ACTIVATION)
    elif ACTIVATION == "relu2":
        acc = tl.where(acc < 0.0, 0.0, acc * acc)  # NaN stays
    to = out_ptr + places.to(tl.int64)[:, None] * OUTPUTS + outputs[None, :]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=(places < end)[:, None] & (outputs < OUTPUTS)[None, :])


@triton.jit
def _combine_kernel(
    parts_ptr,
    places_ptr,
    weights_ptr,
    shared_ptr,
    gate_ptr,
    out_ptr,
    width,
    NUM_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program for BLOCK columns of a token; ranks are added in their order."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(NUM_CHOSEN):
        place = tl.load(places_ptr + token * NUM_CHOSEN + rank).to(tl.int64)
        part = tl.load(parts_ptr + place * width + column, inside, 0.0).to(tl.float32)
        total += tl.load(weights_ptr + token * NUM_CHOSEN + rank) * part
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + token * width + column, inside, 0.0)
        if gate_ptr is not None:
            shared *= tl.sigmoid(tl.load(gate_ptr + token))
        total += shared
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), inside)
