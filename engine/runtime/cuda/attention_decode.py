"""Decode attention: slices with one query, each context cut into parallel splits.

One program takes a slice, a kv head and a split; the query heads that share the kv head are the rows of its products.
With several splits a second kernel merges the partial results. The host chooses the number of splits; the device
computes the keys of a split from the actual context. So a captured graph stays correct for any context, and programs
after the end of a context exit immediately. The host code runs on the engine thread and waits for nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.runtime.cuda.attention_merge import merge_row
from engine.runtime.cuda.attention_tile import LOG2E, add_sink, attend_keys
from engine.runtime.cuda.attention_tuning import Cut, DecodeTile
from engine.runtime.cuda.store import PoolView
from engine.runtime.kv_layout import AttentionSpec

MAX_SPLITS = 64


class Splits(NamedTuple):
    """The number of splits of a context, and the least number of keys in one."""

    num: int
    min_keys: int


def choose_splits(num_programs: int, max_context: int, num_sms: int, cut: Cut) -> Splits:
    """Return enough splits to fill the device; `num_programs` is slices times kv heads.

    The context is rounded up to a power of two, so that the choice is stable between steps. With enough programs, only
    contexts longer than the cut's `max_keys` are split.
    """
    bucket = max(cut.min_keys, triton.next_power_of_2(max_context))
    to_fill = -(-cut.programs_per_sm * num_sms // num_programs)
    num = min(max(to_fill, bucket // cut.max_keys, 1), bucket // cut.min_keys, MAX_SPLITS)
    return Splits(num, cut.min_keys if to_fill > 1 else cut.max_keys)


@triton.jit
def cut_context(context, num_splits, min_split_keys, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the first tile's position in a context, and the number of keys of a split."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0) // BLOCK_N * BLOCK_N
    keys = tl.maximum(tl.cdiv(context - first, num_splits), min_split_keys)
    return first, tl.cdiv(keys, BLOCK_N) * BLOCK_N


STEP_ARGS = ("slices", "query_starts", "context_lens", "block_tables")  # whose addresses and widths change every step


@triton.jit(
    do_not_specialize=["table_stride", "num_splits", "min_split_keys"], do_not_specialize_on_alignment=STEP_ARGS
)
def _decode_kernel(
    q,  # [T, H, D], as out
    out,
    partial,  # [pieces, H, splits, D] float32, normalised
    partial_lse,  # [pieces, H, splits] float32, in base 2
    k_pool,
    v_pool,
    k_scales,
    v_scales,
    sinks,
    slices,
    query_starts,
    context_lens,
    block_tables,
    table_stride,
    num_splits,
    min_split_keys,
    scale,
    softcap,
    q_stride,
    q_head_stride,
    out_stride,
    block_stride,
    head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    piece, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    index = tl.load(slices + piece)
    context = tl.load(context_lens + index)
    first, split_keys = cut_context(context, num_splits, min_split_keys, WINDOW, BLOCK_N)
    begin = first + split * split_keys
    end = tl.minimum(begin + split_keys, context)
    if IS_SPLIT and begin >= end:
        return

    row = tl.load(query_starts + index).to(tl.int64)
    groups, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + groups
    is_row = (groups < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    queries = tl.load(q + row * q_stride + heads[:, None] * q_head_stride + dims[None, :], mask=is_row, other=0)
    peak, total, acc = attend_keys(
        queries,
        tl.full([BLOCK_M], context - 1, tl.int32),
        tl.full([BLOCK_M], -float("inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        begin,
        end,
        block_tables + index.to(tl.int64) * table_stride,
        k_pool + kv_head * head_stride,
        v_pool + kv_head * head_stride,
        k_scales + kv_head * head_stride // 4 if k_scales is not None else None,
        v_scales + kv_head * head_stride // 4 if v_scales is not None else None,
        block_stride,
        scale,
        softcap,
        HEAD_DIM,
        BLOCK_SIZE,
        BLOCK_N,
        BLOCK_D,
        WINDOW,
        HAS_SOFTCAP,
        IS_MASKED=True,
        IN_PAIRS=k_scales is not None,
    )
    if IS_SPLIT:
        entry = (piece * tl.num_programs(1) * GROUP + heads).to(tl.int64) * num_splits + split
        tl.store(partial + entry[:, None] * HEAD_DIM + dims[None, :], acc / total[:, None], mask=is_row)
        tl.store(partial_lse + entry, peak + tl.log2(total), mask=groups < GROUP)
    else:
        if sinks is not None:
            sink = tl.load(sinks + heads, mask=groups < GROUP, other=0.0).to(tl.float32) * LOG2E
            peak, total, acc = add_sink(peak, total, acc, sink)
        # A padding slice of a captured graph has no context: its row is zero.
        result = tl.where(context > 0, acc / total[:, None], 0.0)
        to = out + row * out_stride + heads[:, None] * HEAD_DIM + dims[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=is_row)


@triton.jit(do_not_specialize=["num_splits", "min_split_keys"], do_not_specialize_on_alignment=STEP_ARGS[:3])
def _merge_kernel(
    out,
    partial,
    partial_lse,
    sinks,
    slices,
    query_starts,
    context_lens,
    num_splits,
    min_split_keys,
    out_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
):
    piece, head = tl.program_id(0), tl.program_id(1)
    index = tl.load(slices + piece)
    context = tl.load(context_lens + index)
    first, split_keys = cut_context(context, num_splits, min_split_keys, WINDOW, BLOCK_N)
    num_live = tl.cdiv(context - first, split_keys)  # no sinks without a context
    entry = (piece * tl.num_programs(1) + head).to(tl.int64) * num_splits
    row = tl.load(query_starts + index).to(tl.int64)
    to = out + row * out_stride + head * HEAD_DIM
    merge_row(to, partial, partial_lse, entry, 1, num_live, sinks, head, HEAD_DIM, BLOCK_D)


def attend_decodes(
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
    tile: DecodeTile,
) -> None:
    """Write the rows of `out` [T, H, D] of the first `num` slices, one query each."""
    heads, dim = spec.num_heads, spec.head_dim
    group = heads // spec.num_kv_heads
    block_d = max(16, triton.next_power_of_2(dim))
    is_split = splits.num > 1
    partial = partial_lse = None
    if is_split:
        partial = torch.empty((num, heads, splits.num, dim), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty((num, heads, splits.num), dtype=torch.float32, device=q.device)
    _decode_kernel[(num, spec.num_kv_heads, splits.num)](
        q,
        out,
        partial,
        partial_lse,
        pool.k,
        pool.v,
        pool.k_scales,
        pool.v_scales,
        spec.sinks,
        slices,
        query_starts,
        context_lens,
        block_tables,
        block_tables.stride(0),
        splits.num,
        splits.min_keys,
        spec.scale,
        spec.softcap or 0.0,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        *pool.strides,
        GROUP=group,
        HEAD_DIM=dim,
        BLOCK_SIZE=pool.block_size,
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        BLOCK_N=tile.keys,
        BLOCK_D=block_d,
        WINDOW=spec.window or 0,
        HAS_SOFTCAP=spec.softcap is not None,
        IS_SPLIT=is_split,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if partial is not None and partial_lse is not None:
        merge_splits(spec, out, (partial, partial_lse), slices, query_starts, context_lens, splits, tile.keys)


def merge_splits(
    spec: AttentionSpec,
    out: Tensor,
    partial: tuple[Tensor, Tensor],
    slices: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    splits: Splits,
    num_keys: int,
) -> None:
    """Merge partial results, and the logarithms of their sums, of splits made in tiles of `num_keys`."""
    _merge_kernel[partial[0].shape[:2]](
        out,
        *partial,
        spec.sinks,
        slices,
        query_starts,
        context_lens,
        splits.num,
        splits.min_keys,
        out.stride(0),
        HEAD_DIM=spec.out_dim,
        BLOCK_N=num_keys,
        BLOCK_D=max(16, triton.next_power_of_2(spec.out_dim)),
        WINDOW=spec.window or 0,
        num_warps=4,
    )
