"""The rules of Gated DeltaNet and Mamba-2 for prompts, a chunk at a time.

With sums of log decays G over a chunk, S the state before it, rates b, and the changes D of its tokens

    O = exp(G) Q S + P D                  P[i, j] = exp(G[i] - G[j]) q[i] k[j], j <= i
    S' = exp(G[-1]) S + sum of exp(G[-1] - G[j]) k[j] D[j]

Mamba-2 has D = b V, and skips to O. Changes by the delta rule solve

    (1 + L) D = b (V - exp(G) K S)        L[i, j] = b[i] exp(G[i] - G[j]) k[i] k[j], j < i

No exponent is positive. Chunks end at multiples of CHUNK positions of a sequence, so its cuts into steps move none but the
ends. (1 + L)^-1 and P do not depend on S: all chunks compute them in one launch, and a second one goes through the chunks of
each slice. Of Mamba-2 the first has the products of queries and keys alone, which the heads of a group share. Products are of
float32 numbers, as in attention. Engine thread.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from engine.runtime.cuda.attention_tile import PRECISION
from engine.runtime.cuda.recurrence_state import STEP_ARGS, Sizes, leave_rows, locate_matrix
from engine.runtime.kv_layout import CHUNK, StateTensors

_DIAGONAL = 16  # rows of the blocks that are inverted row by row
_PART = 16  # numbers of a key in one product


def compute_chunks(shared: dict[str, Any], sizes: Sizes, step: StateTensors, num_programs: int) -> None:
    """Compute the step's prompts; `shared` are the arguments of the kernel that computes token by token."""
    # One stage: programs load what they have written, which must not be fetched earlier.
    blocks = {"BLOCK": CHUNK, "PART": _PART, "num_stages": 1}
    # By chunk and head (1 + L)^-1, then P; or by chunk and group Q K'.
    grid = len(step.chunks), sizes.num_v_heads if sizes.is_delta else sizes.num_k_heads
    tiles = torch.empty((*grid, 1 + sizes.is_delta, CHUNK, CHUNK), dtype=torch.float32, device=shared["out"].device)
    keys = {name: shared[name] for name in ("mixed", "CHANNELS", "HK", "K")} | {"tiles": tiles, "chunks": step.chunks}
    if sizes.is_delta:
        heads = {name: shared[name] for name in ("gates", "HV", "SHARED")}
        _solve_chunks[grid](**keys, **heads, DIAGONAL=_DIAGONAL, num_warps=8, **blocks)
    else:
        _score_chunks[grid](**keys, num_warps=8, **blocks)
    _scan_chunks[(len(step.prompts), num_programs)](
        **shared, tiles=tiles, chunks=step.chunks, prompts=step.prompts, num_warps=4, **blocks
    )


@triton.jit
def _product(left, right, acc, BLOCK: tl.constexpr, PART: tl.constexpr):
    """Return acc + left right, of tiles in memory, a part at a time: of whole ones the compiler spills registers."""
    i, j = tl.arange(0, BLOCK), tl.arange(0, PART)
    for part in range(0, BLOCK, PART):
        some = tl.load(left + i[:, None] * BLOCK + part + j[None, :])
        others = tl.load(right + (part + j[:, None]) * BLOCK + i[None, :])
        acc = tl.dot(some, others, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _scores(q_at, k_at, num, K: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Return Q K' of a chunk, from the first PART numbers of its rows on; zeros for rows after its end."""
    dims, is_row = tl.arange(0, PART)[None, :], tl.arange(0, BLOCK)[:, None] < num
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for part in range(0, K, PART):
        mask = is_row & (part + dims < K)
        k = tl.load(k_at + part, mask=mask, other=0.0)
        total = tl.dot(tl.load(q_at + part, mask=mask, other=0.0), tl.trans(k), total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize_on_alignment=["chunks"])
def _score_chunks(
    mixed,
    tiles,
    chunks,
    CHANNELS: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for one group of a chunk."""
    chunk, group = tl.program_id(0), tl.program_id(1)
    first, num = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    i, j = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    at = mixed + (first + i).to(tl.int64) * CHANNELS + group * K + tl.arange(0, PART)[None, :]
    tile = tiles + (chunk * HK + group).to(tl.int64) * BLOCK * BLOCK
    tl.store(tile + i * BLOCK + j, tl.where(i >= j, _scores(at, at + HK * K, num, K, PART, BLOCK), 0.0))


@triton.jit
def _gates_of(gates, virtual, head, inside, HV: tl.constexpr):
    """Return sums of log decays, and rates, of a chunk's rows."""
    gate = gates + virtual * 2 * HV + head
    return tl.cumsum(tl.load(gate, mask=inside, other=0.0), 0), tl.load(gate + HV, mask=inside, other=0.0)


@triton.jit(do_not_specialize_on_alignment=["chunks"])
def _solve_chunks(
    mixed,
    gates,
    tiles,
    chunks,
    CHANNELS: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    DIAGONAL: tl.constexpr,
):
    """One program for one head of a chunk. Rows after a short chunk's end have the rate 0, and no effect."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, num = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    i, j, dims = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :], tl.arange(0, PART)[None, :]
    rows = tl.arange(0, BLOCK)
    virtual = (first + rows).to(tl.int64)
    sums, rates = _gates_of(gates, virtual, head, rows < num, HV)
    at = mixed + virtual[:, None] * CHANNELS + head // SHARED % HK * K + dims
    lower = tl.zeros([BLOCK, BLOCK], tl.float32)
    for part in range(0, K, PART):
        k = tl.load(at + HK * K + part, mask=(i < num) & (part + dims < K), other=0.0)
        lower = tl.dot(k, tl.trans(k), lower, input_precision=PRECISION)
    decay = tl.exp(tl.where(i >= j, sums[:, None] - sums[None, :], 0.0))
    lower = tl.where(i > j, lower * decay * rates[:, None], 0.0)
    # Blocks on the diagonal are inverted by substitution, all together: a row of each at a time. Powers of L would have
    # huge terms where tokens repeat.
    is_diagonal = i // DIAGONAL == j // DIAGONAL
    inverse = tl.where(i == j, 1.0, 0.0)
    for row in range(1, DIAGONAL):
        is_row = is_diagonal & (i % DIAGONAL == row)
        factors = tl.sum(tl.where(is_row, lower, 0.0), 0)  # by column: what the row of the column's block has there
        inverse -= tl.where(is_row, tl.sum(factors[:, None] * inverse, 0)[None, :], 0.0)
    # With their inverse D, (1 + L)^-1 is the sum of N^n D for N = D (D^-1 - 1 - L), which has few powers.
    tile = tiles + (chunk * HV + head).to(tl.int64) * 2 * BLOCK * BLOCK
    other, at_tile = tile + BLOCK * BLOCK, i * BLOCK + j
    tl.store(tile + at_tile, inverse)
    tl.store(other + at_tile, tl.where(is_diagonal, 0.0, -lower))
    tl.debug_barrier()
    power = _product(tile, other, tl.zeros([BLOCK, BLOCK], tl.float32), BLOCK, PART)
    tl.debug_barrier()
    tl.store(other + at_tile, power)
    for _ in range(1, BLOCK // DIAGONAL):
        tl.debug_barrier()
        total = _product(other, tile, inverse, BLOCK, PART)
        tl.debug_barrier()
        tl.store(tile + at_tile, total)
    p = _scores(at, at + HK * K, num, K, PART, BLOCK)
    tl.debug_barrier()
    tl.store(other + at_tile, tl.where(i >= j, p * decay, 0.0))


@triton.jit
def _add_tokens(
    scores,
    sums,
    v,
    is_column,
    gates,
    first,
    num,
    acc,
    CHANNELS: tl.constexpr,
    HV: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return acc + P D of Mamba-2, some tokens at a time, for the reason of `_product`; Q K' is in memory."""
    i, j = tl.arange(0, BLOCK)[:, None], tl.arange(0, PART)
    for part in range(0, BLOCK, PART):
        at, inside = (first + part + j).to(tl.int64), part + j < num
        own = tl.sum(tl.where(i == (part + j)[None, :], sums[:, None], 0.0), 0)
        rates = tl.load(gates + at * 2 * HV + HV, mask=inside, other=0.0)
        change = tl.load(v + at[:, None] * CHANNELS, mask=inside[:, None] & is_column, other=0.0) * rates[:, None]
        # Above the diagonal scores are 0, and exponents may be positive.
        p = tl.load(scores + i * BLOCK + part + j[None, :]) * tl.exp(tl.minimum(sums[:, None] - own[None, :], 0.0))
        acc = tl.dot(p, change, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize_on_alignment=[*STEP_ARGS, "chunks", "prompts"])
def _scan_chunks(
    x,
    mixed,
    gates,
    skip,
    out,
    tiles,
    matrices,
    tails,
    places,
    drafts,
    chunks,
    prompts,
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
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for one piece of a slice's state, through all chunks of the slice."""
    prompt, piece = prompts + 3 * tl.program_id(0), tl.program_id(1)
    index, first_chunk, num_chunks = tl.load(prompt), tl.load(prompt + 1), tl.load(prompt + 2)
    head = piece // (V // COLUMNS)
    dims, columns, tokens = tl.arange(0, PART), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK)
    is_column = (columns < COLUMNS)[None, :]
    at = dims[:, None] * COLUMNS + columns[None, :]
    came_from, is_there = locate_matrix(matrices, places, read, index, piece, slot_width, matrix_stride)
    goes_to, _ = locate_matrix(matrices, places, written, index, piece, slot_width, matrix_stride)
    for part in range(0, K, PART):
        mask = (part + dims < K)[:, None] & is_column
        s = tl.load(came_from + part * COLUMNS + at, mask=mask & is_there, other=0.0)
        tl.store(goes_to + part * COLUMNS + at, s, mask=mask)
    begin, own = tl.load(begins + index), tl.load(starts + index)
    v_at = mixed + 2 * HK * K + piece * COLUMNS + columns[None, :]
    square, zero = tokens[:, None] * BLOCK + tokens[None, :], tl.zeros([BLOCK, BLOCK_C], tl.float32)
    for chunk in range(first_chunk, first_chunk + num_chunks):
        first, num = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
        inside = tokens < num
        virtual = (first + tokens).to(tl.int64)
        sums, rates = _gates_of(gates, virtual, head, inside, HV)
        last = tl.min(sums, 0)  # no gate is positive
        q_at = mixed + virtual[:, None] * CHANNELS + head // SHARED % HK * K + dims[None, :]
        is_value = inside[:, None] & is_column
        read_q, read_k = zero, zero
        tl.debug_barrier()
        for part in range(0, K, PART):
            is_key, mask = inside[:, None] & (part + dims < K)[None, :], (part + dims < K)[:, None] & is_column
            s = tl.load(goes_to + part * COLUMNS + at, mask=mask, other=0.0).to(tl.float32)
            if IS_DELTA:
                read_k = tl.dot(
                    tl.load(q_at + HK * K + part, mask=is_key, other=0.0), s, read_k, input_precision=PRECISION
                )
            read_q = tl.dot(tl.load(q_at + part, mask=is_key, other=0.0), s, read_q, input_precision=PRECISION)
        decay = tl.exp(sums)[:, None]
        v = tl.load(v_at + virtual[:, None] * CHANNELS, mask=is_value, other=0.0)
        if IS_DELTA:
            tile = tiles + (chunk * HV + head).to(tl.int64) * 2 * BLOCK * BLOCK + square
            change = tl.dot(tl.load(tile), (v - decay * read_k) * rates[:, None], zero, input_precision=PRECISION)
            o = tl.dot(tl.load(tile + BLOCK * BLOCK), change, decay * read_q, input_precision=PRECISION)
        else:
            change, o = v * rates[:, None], decay * read_q + v * tl.load(skip + head)
            tile = tiles + (chunk * HK + head // SHARED % HK).to(tl.int64) * BLOCK * BLOCK
            o = _add_tokens(tile, sums, v_at, is_column, gates + head, first, num, o, CHANNELS, HV, PART, BLOCK)
        to = (own + first - begin + tokens).to(tl.int64)[:, None] * HV * V + piece * COLUMNS + columns[None, :]
        tl.store(out + to, o, mask=is_value)
        change *= tl.exp(last - sums)[:, None]
        tl.debug_barrier()
        for part in range(0, K, PART):
            is_key, mask = inside[:, None] & (part + dims < K)[None, :], (part + dims < K)[:, None] & is_column
            s = tl.load(goes_to + part * COLUMNS + at, mask=mask, other=0.0).to(tl.float32) * tl.exp(last)
            s = tl.dot(
                tl.trans(tl.load(q_at + HK * K + part, mask=is_key, other=0.0)), change, s, input_precision=PRECISION
            )
            tl.store(goes_to + part * COLUMNS + at, s, mask=mask)
    num_own = tl.load(num_kept + index)
    leave_rows(
        x, drafts, tails, places, read, written, index, tl.load(rows + index), own, num_own, num_own, 0, piece, x_stride,
        draft_stride, tail_stride, slot_width, CHANNELS, WIDTH, PITCH, FIRST, SEGMENT, KERNEL, SHARE, BLOCK_S,
    )  # fmt: skip
