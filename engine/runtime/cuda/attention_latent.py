"""Attention over latents (MLA): many query heads, one row of keys a token, whose first numbers are the values.

A tile of latents is read once, and multiplied twice: by the queries, and by the weights. Queries and keys have a second
part, the rotated numbers, which carry no value. Decodes are split over their contexts and prompts are cut into parts as
in attention_decode.py and attention_prefill.py, whose merges serve here, too. Engine thread; waits for nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.runtime.cuda.attention_decode import STEP_ARGS, Splits, cut_context, merge_splits
from engine.runtime.cuda.attention_prefill import WorkTensors, merge_parts
from engine.runtime.cuda.attention_tile import LOG2E, PRECISION, load_rows, locate
from engine.runtime.cuda.attention_tuning import PromptTile
from engine.runtime.cuda.store import PoolView
from engine.runtime.kv_layout import AttentionSpec


@triton.jit
def _load_queries(q, rows, is_row, RANK: tl.constexpr, DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return both parts of queries that begin at `rows` [BLOCK_M]; zeros elsewhere."""
    at, turned_at = tl.arange(0, BLOCK_R), RANK + tl.arange(0, BLOCK_T)
    latent = tl.load(q + rows[:, None] + at[None, :], mask=is_row[:, None] & (at < RANK)[None, :], other=0)
    mask = is_row[:, None] & (turned_at < DIM)[None, :]
    return latent, tl.load(q + rows[:, None] + turned_at[None, :], mask=mask, other=0)


@triton.jit
def _attend_latents(
    q,  # [BLOCK_M, BLOCK_R]
    q_turned,  # [BLOCK_M, BLOCK_T]
    q_at,  # [BLOCK_M] positions
    begin,  # key positions begin .. end - 1; begin at a tile's start
    end,
    table,  # the sequence's blocks
    pool,
    block_stride,
    scale,
    RANK: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Return the highest exponent in base 2, the sum of weights, and the weighted values of each row."""
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    scale *= LOG2E
    last = tl.minimum(q_at, end - 1)
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        rows, _ = locate(table, keys, end, block_stride, DIM, BLOCK_SIZE)
        latents = load_rows(pool, rows, tl.arange(0, BLOCK_R), RANK, q.dtype)
        turned = load_rows(pool, rows + RANK, tl.arange(0, BLOCK_T), DIM - RANK, q.dtype)
        scores = tl.dot(q_turned, tl.trans(turned), input_precision=PRECISION)
        scores = tl.dot(q, tl.trans(latents), scores, input_precision=PRECISION) * scale
        scores = tl.where(keys[None, :] <= last[:, None], scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)  # a row may see no key of a part
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(peak - base)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), latents, acc * decay[:, None], input_precision=PRECISION)
        peak = new_peak
    return peak, total, acc


@triton.jit(
    do_not_specialize=["table_stride", "num_splits", "min_split_keys"], do_not_specialize_on_alignment=STEP_ARGS
)
def _latent_decode_kernel(
    q,  # [T, H, DIM]
    out,  # [T, H, RANK]
    partial,  # [pieces, H, splits, RANK] float32, normalised
    partial_lse,  # [pieces, H, splits] float32, in base 2
    pool,
    slices,
    query_starts,
    context_lens,
    block_tables,
    table_stride,
    num_splits,
    min_split_keys,
    scale,
    q_stride,
    q_head_stride,
    out_stride,
    block_stride,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """One program for BLOCK_M heads of a slice, and a split of its context."""
    piece, split = tl.program_id(0), tl.program_id(2)
    index = tl.load(slices + piece)
    context = tl.load(context_lens + index)
    first, split_keys = cut_context(context, num_splits, min_split_keys, 0, BLOCK_N)
    begin = first + split * split_keys
    end = tl.minimum(begin + split_keys, context)
    if IS_SPLIT and begin >= end:
        return
    row = tl.load(query_starts + index).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_head = heads < NUM_HEADS
    queries, turned = _load_queries(q, row * q_stride + heads * q_head_stride, is_head, RANK, DIM, BLOCK_R, BLOCK_T)
    peak, total, acc = _attend_latents(
        queries, turned, tl.full([BLOCK_M], context - 1, tl.int32), begin, end,
        block_tables + index.to(tl.int64) * table_stride, pool, block_stride, scale,
        RANK, DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_R, BLOCK_T,
    )  # fmt: skip
    dims = tl.arange(0, BLOCK_R)
    mask = is_head[:, None] & (dims < RANK)[None, :]
    if IS_SPLIT:
        entry = (piece * NUM_HEADS + heads).to(tl.int64) * num_splits + split
        tl.store(partial + entry[:, None] * RANK + dims[None, :], acc / total[:, None], mask=mask)
        tl.store(partial_lse + entry, peak + tl.log2(total), mask=is_head)
    else:
        # A padding slice of a captured graph has no context: its row is zero.
        result = tl.where(context > 0, acc / total[:, None], 0.0)
        to = out + row * out_stride + heads[:, None] * RANK + dims[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["pieces", "query_starts", "context_lens", "block_tables"],
)
def _latent_prefill_kernel(
    q,  # [T, H, DIM]
    out,  # [T, H, RANK]
    partial,  # [parts, 1, BLOCK_M, RANK] float32, normalised
    partial_lse,  # [parts, 1, BLOCK_M] float32, in base 2
    pool,
    pieces,  # [N, 5] int32, as PromptWork has them
    query_starts,
    context_lens,
    block_tables,
    table_stride,
    scale,
    q_stride,
    q_head_stride,
    out_stride,
    block_stride,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One program for BLOCK_M rows of a slice: row r is query r // NUM_HEADS, head r % NUM_HEADS."""
    piece = pieces + 5 * tl.program_id(0)
    index, first_row = tl.load(piece), tl.load(piece + 1)
    begin, end, part = tl.load(piece + 2), tl.load(piece + 3), tl.load(piece + 4)
    first_token = tl.load(query_starts + index)
    num_queries = tl.load(query_starts + index + 1) - first_token
    rows = first_row + tl.arange(0, BLOCK_M)
    at, heads = rows // NUM_HEADS, rows % NUM_HEADS
    is_row = at < num_queries
    tokens = (first_token + at).to(tl.int64)
    queries, turned = _load_queries(q, tokens * q_stride + heads * q_head_stride, is_row, RANK, DIM, BLOCK_R, BLOCK_T)
    peak, total, acc = _attend_latents(
        queries, turned, tl.load(context_lens + index) - num_queries + at, begin, end,
        block_tables + index.to(tl.int64) * table_stride, pool, block_stride, scale,
        RANK, DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_R, BLOCK_T,
    )  # fmt: skip
    dims = tl.arange(0, BLOCK_R)
    mask = is_row[:, None] & (dims < RANK)[None, :]
    some = tl.where(total > 0, total, 1.0)  # a row may see none of a part's keys; then its peak is -inf
    if part < 0:
        to = out + (tokens * out_stride + heads * RANK)[:, None] + dims[None, :]
        tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
    else:
        entries = part.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(partial + entries[:, None] * RANK + dims[None, :], acc / some[:, None], mask=mask)
        tl.store(partial_lse + entries, peak + tl.log2(some), mask=is_row)


def attend_latent_decodes(
    spec: AttentionSpec,
    q: Tensor,
    out: Tensor,
    pool: PoolView,
    slices: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    num: int,
    splits: Splits,
    tile: PromptTile,
) -> None:
    """Write the rows of `out` [T, H, RANK] of the first `num` slices, one query each."""
    partial = partial_lse = None
    if splits.num > 1:
        partial = torch.empty((num, spec.num_heads, splits.num, spec.out_dim), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty((num, spec.num_heads, splits.num), dtype=torch.float32, device=q.device)
    _latent_decode_kernel[(num, triton.cdiv(spec.num_heads, tile.rows), splits.num)](
        q,
        out,
        partial,
        partial_lse,
        pool.k,
        slices,
        query_starts,
        context_lens,
        block_tables,
        block_tables.stride(0),
        splits.num,
        splits.min_keys,
        spec.scale,
        *q.stride()[:2],
        out.stride(0),
        pool.strides[0],
        IS_SPLIT=splits.num > 1,
        **_sizes(spec, pool, tile),
    )
    if partial is not None and partial_lse is not None:
        merge_splits(spec, out, (partial, partial_lse), slices, query_starts, context_lens, splits, tile.keys)


def attend_latent_prefills(
    spec: AttentionSpec,
    q: Tensor,
    out: Tensor,
    pool: PoolView,
    work: WorkTensors,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    tile: PromptTile,
) -> None:
    """Write the rows of `out` [T, H, RANK] in `work`, listed for this kind of layer and `tile`."""
    # Empty without parts, but of the same type, so that the kernel is not compiled again.
    partial_lse = torch.empty((work.num_parts, 1, tile.rows), dtype=torch.float32, device=q.device)
    partial = torch.empty((*partial_lse.shape, spec.out_dim), dtype=torch.float32, device=q.device)
    _latent_prefill_kernel[(work.pieces.shape[0],)](
        q,
        out,
        partial,
        partial_lse,
        pool.k,
        work.pieces,
        query_starts,
        context_lens,
        block_tables,
        block_tables.stride(0),
        spec.scale,
        *q.stride()[:2],
        out.stride(0),
        pool.strides[0],
        **_sizes(spec, pool, tile),
    )
    if work.num_parts:
        merge_parts(spec, out, (partial, partial_lse), work, query_starts, tile)


def _sizes(spec: AttentionSpec, pool: PoolView, tile: PromptTile) -> dict[str, int]:
    """Return the constants of both kernels."""
    return {
        "NUM_HEADS": spec.num_heads,
        "RANK": spec.out_dim,
        "DIM": spec.head_dim,
        "BLOCK_SIZE": pool.block_size,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys,
        "BLOCK_R": max(16, triton.next_power_of_2(spec.out_dim)),
        "BLOCK_T": max(16, triton.next_power_of_2(spec.head_dim - spec.out_dim)),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
