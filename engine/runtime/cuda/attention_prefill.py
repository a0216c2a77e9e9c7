"""Prompt attention: slices with several queries, causal, over the paged pool.

The rows of a tile are queries times the heads that share a kv head, packed without gaps: row r of a slice is query r //
group, head r % group. One program takes one tile and one kv head. Where that would leave most of the device idle (a few
new tokens after a long context are few tiles), it takes a part of the tile's keys, and a second kernel merges the
parts. The host lists tiles and parts, the longest first, so no program is empty and the device does not end on a long
one. Engine thread; waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.runtime.cuda.attention_merge import merge_row
from engine.runtime.cuda.attention_tile import LOG2E, add_sink, attend_keys
from engine.runtime.cuda.attention_tuning import Cut, PromptTile, Tuning
from engine.runtime.cuda.store import PoolView
from engine.runtime.kv_layout import AttentionSpec


class PromptWork(NamedTuple):
    """The work of a step's programs, as lists; `attend_prefills` takes it as tensors."""

    pieces: list[list[int]]  # [slice, first row, first key, end of the keys, part or -1 for a tile that is not cut]
    cut_tiles: list[list[int]]  # [slice, first row, first part, number of parts]
    num_parts: int


class WorkTensors(NamedTuple):
    """PromptWork on the device."""

    pieces: Tensor  # [N, 5] int32
    cut_tiles: Tensor  # [M, 4] int32
    num_parts: int


def choose_tile(tuning: Tuning, longest_query: int, group: int) -> PromptTile:
    """Return the short tile if it holds each slice of the step, else the other one."""
    return tuning.short if longest_query * group <= tuning.short.rows else tuning.long


def list_work(
    slices: Sequence[int],
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    spec: AttentionSpec,
    tile: PromptTile,
    cut: Cut,
    num_sms: int,
) -> PromptWork:
    """Return all tiles of some slices, most keys first; long ones are cut into parts."""
    group = spec.num_heads // spec.num_kv_heads
    tiles = []
    for s in slices:
        start, num_rows = context_lens[s] - query_lens[s], query_lens[s] * group
        for row in range(0, num_rows, tile.rows):
            end = start + (min(row + tile.rows, num_rows) - 1) // group + 1
            seen = 0 if spec.window is None else max(start + row // group - spec.window + 1, 0)
            tiles.append((s, row, seen // tile.keys * tile.keys, end))
    num_keys = spec.num_kv_heads * sum(end - begin for _, _, begin, end in tiles)
    share = max(cut.min_keys, -(-num_keys // (cut.programs_per_sm * num_sms)))
    pieces, cut_tiles, num_parts = [], [], 0
    for s, row, begin, end in tiles:
        # Parts are of one length except the last, each of whole tiles of keys. Up to twice a share is not cut:
        # otherwise nearly all tiles of a prompt of a thousand tokens would have a partial result.
        num = -(-(end - begin) // share) if end - begin > 2 * share else 1
        keys = -(-(end - begin) // num)
        starts = range(begin, end, -(-keys // tile.keys) * tile.keys)
        if len(starts) == 1:
            pieces.append([s, row, begin, end, -1])
            continue
        cut_tiles.append([s, row, num_parts, len(starts)])
        for first in starts:
            pieces.append([s, row, first, min(first + starts.step, end), num_parts])
            num_parts += 1
    pieces.sort(key=lambda piece: piece[2] - piece[3])
    return PromptWork(pieces, cut_tiles, num_parts)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["pieces", "query_starts", "context_lens", "block_tables"],
)
def _prefill_kernel(
    q,  # [T, H, D], as out
    out,
    partial,  # [parts, Hkv, BLOCK_M, D] float32, normalised
    partial_lse,  # [parts, Hkv, BLOCK_M] float32, in base 2
    k_pool,
    v_pool,
    k_scales,
    v_scales,
    sinks,
    pieces,  # [N, 5] int32, as PromptWork has them
    query_starts,
    context_lens,
    block_tables,
    table_stride,
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
):
    piece, kv_head = pieces + 5 * tl.program_id(0), tl.program_id(1)
    index, first_row = tl.load(piece), tl.load(piece + 1)
    begin, end, part = tl.load(piece + 2), tl.load(piece + 3), tl.load(piece + 4)
    first_token = tl.load(query_starts + index)
    num_queries = tl.load(query_starts + index + 1) - first_token
    context = tl.load(context_lens + index)

    rows, dims = first_row + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    queries = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    q_at = context - num_queries + queries
    is_row = (queries < num_queries)[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (first_token + queries).to(tl.int64)
    q_tile = tl.load(q + (tokens * q_stride + heads * q_head_stride)[:, None] + dims[None, :], mask=is_row, other=0)

    table = block_tables + index.to(tl.int64) * table_stride
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    k_pool += kv_head * head_stride
    v_pool += kv_head * head_stride
    if k_scales is not None:
        k_scales += kv_head * head_stride // 4
        v_scales += kv_head * head_stride // 4
    if WINDOW == 0:
        # All rows see the keys up to the first row's own position.
        first_at = context - num_queries + first_row // GROUP
        masked = tl.maximum(tl.minimum((first_at + 1) // BLOCK_N * BLOCK_N, end), begin)
        peak, total, acc = attend_keys(
            q_tile, q_at, peak, total, acc, begin, masked, table, k_pool, v_pool, k_scales, v_scales, block_stride,
            scale, softcap, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, WINDOW, HAS_SOFTCAP, IS_MASKED=False, IN_PAIRS=False,
        )  # fmt: skip
        begin = masked
    peak, total, acc = attend_keys(
        q_tile, q_at, peak, total, acc, begin, end, table, k_pool, v_pool, k_scales, v_scales, block_stride,
        scale, softcap, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, WINDOW, HAS_SOFTCAP, IS_MASKED=True, IN_PAIRS=False,
    )  # fmt: skip
    if part < 0:
        if sinks is not None:
            sink = tl.load(sinks + heads).to(tl.float32) * LOG2E
            peak, total, acc = add_sink(peak, total, acc, sink)
        to = out + (tokens * out_stride + heads * HEAD_DIM)[:, None] + dims[None, :]
        tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_row)
    else:
        entries = (part * tl.num_programs(1) + kv_head).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        some = tl.where(total > 0, total, 1.0)  # a row may see none of the part's keys; then its peak is -inf
        tl.store(partial + entries[:, None] * HEAD_DIM + dims[None, :], acc / some[:, None], mask=is_row)
        tl.store(partial_lse + entries, peak + tl.log2(some), mask=queries < num_queries)


@triton.jit(do_not_specialize_on_alignment=["cut_tiles", "query_starts"])
def _merge_kernel(
    out,
    partial,
    partial_lse,
    sinks,
    cut_tiles,  # [N, 4] int32, as PromptWork has them
    query_starts,
    out_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tile, kv_head = cut_tiles + 4 * tl.program_id(0), tl.program_id(1)
    index, row = tl.load(tile), tl.load(tile + 1) + tl.program_id(2)
    first_part, num_parts = tl.load(tile + 2), tl.load(tile + 3)
    token = tl.load(query_starts + index) + row // GROUP
    if token >= tl.load(query_starts + index + 1):
        return
    head = kv_head * GROUP + row % GROUP
    num_kv_heads = tl.num_programs(1)
    entry = (first_part * num_kv_heads + kv_head).to(tl.int64) * BLOCK_M + tl.program_id(2)
    to = out + token.to(tl.int64) * out_stride + head * HEAD_DIM
    merge_row(to, partial, partial_lse, entry, num_kv_heads * BLOCK_M, num_parts, sinks, head, HEAD_DIM, BLOCK_D)


def attend_prefills(
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
    """Write the rows of `out` [T, H, D] in `work`, listed for this kind of layer and `tile`."""
    dim, group, block_d = (
        spec.head_dim,
        spec.num_heads // spec.num_kv_heads,
        max(16, triton.next_power_of_2(spec.head_dim)),
    )
    # Empty without parts, but of the same type, so that the kernel is not compiled again.
    partial_lse = torch.empty((work.num_parts, spec.num_kv_heads, tile.rows), dtype=torch.float32, device=q.device)
    partial = torch.empty((*partial_lse.shape, dim), dtype=torch.float32, device=q.device)
    _prefill_kernel[(work.pieces.shape[0], spec.num_kv_heads)](
        q,
        out,
        partial,
        partial_lse,
        pool.k,
        pool.v,
        pool.k_scales,
        pool.v_scales,
        spec.sinks,
        work.pieces,
        query_starts,
        context_lens,
        block_tables,
        block_tables.stride(0),
        spec.scale,
        spec.softcap or 0.0,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        *pool.strides,
        GROUP=group,
        HEAD_DIM=dim,
        BLOCK_SIZE=pool.block_size,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        BLOCK_D=block_d,
        WINDOW=spec.window or 0,
        HAS_SOFTCAP=spec.softcap is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if work.num_parts:
        merge_parts(spec, out, (partial, partial_lse), work, query_starts, tile)


def merge_parts(
    spec: AttentionSpec,
    out: Tensor,
    partial: tuple[Tensor, Tensor],
    work: WorkTensors,
    query_starts: Tensor,
    tile: PromptTile,
) -> None:
    """Merge the partial results of cut tiles, and the logarithms of their sums."""
    _merge_kernel[(work.cut_tiles.shape[0], spec.num_kv_heads, tile.rows)](
        out,
        *partial,
        spec.sinks,
        work.cut_tiles,
        query_starts,
        out.stride(0),
        GROUP=spec.num_heads // spec.num_kv_heads,
        HEAD_DIM=spec.out_dim,
        BLOCK_M=tile.rows,
        BLOCK_D=max(16, triton.next_power_of_2(spec.out_dim)),
        num_warps=4,
    )
