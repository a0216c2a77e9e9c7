"""Prefill attention: slices with several queries, causal, over everything that their contexts hold in the pool.

The rows of a tile are queries times the heads that share a kv head, packed without gaps: row r of a slice is query
r // group, head r % group. One program takes one tile and one kv head. Which tiles there are is listed on the host, the
longest first, so no program is empty and the device does not end on a long one. Engine thread, waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from engine.runtime.attention.base import AttentionSpec
from engine.runtime.cuda.attention_tile import LOG2E, add_sink, attend_keys
from engine.runtime.cuda.store import PoolView


class TileShape(NamedTuple):
    """Rows and keys of a tile, and how many warps and stages of loads work on it. To be swept on a card."""

    rows: int
    keys: int
    warps: int
    stages: int


def tile_shape(head_dim: int, itemsize: int) -> TileShape:
    """As large as 99 KiB of shared memory hold, the least a device has; `itemsize` is the queries'.

    With 16 bits nothing spills out of the registers (compiled for capability 9.0). Float32 is for comparisons.
    """
    if itemsize == 2:
        return TileShape(128, 64, 8, 3) if head_dim <= 128 else TileShape(64, 32, 8, 3)
    if head_dim <= 64:
        return TileShape(64, 32, 4, 3)
    return TileShape(64, 16, 8, 3) if head_dim <= 128 else TileShape(32, 32, 8, 1)


def list_tiles(
    slices: Sequence[int], query_lens: Sequence[int], context_lens: Sequence[int], group: int, num_rows: int
) -> list[list[int]]:
    """All tiles of some slices as [slice, first row], those with most keys first."""
    tiles = [
        (context_lens[s] - query_lens[s] + row // group, s, row)
        for s in slices
        for row in range(0, query_lens[s] * group, num_rows)
    ]
    return [[s, row] for _, s, row in sorted(tiles, reverse=True)]


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["tiles", "query_starts", "context_lens", "block_tables"],
)
def _prefill_kernel(
    q,  # [T, H, D], as out
    out,
    k_pool,
    v_pool,
    k_scales,
    v_scales,
    sinks,
    tiles,
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
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    index, first_row = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
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

    # All rows see the keys up to the first row's own position, but for a window; no row sees one behind the last row's.
    first_at = context - num_queries + first_row // GROUP
    last_query = tl.minimum((first_row + BLOCK_M - 1) // GROUP, num_queries - 1)
    end = context - num_queries + last_query + 1
    table = block_tables + index.to(tl.int64) * table_stride
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    k_pool += kv_head * head_stride
    v_pool += kv_head * head_stride
    if k_scales is not None:
        k_scales += kv_head * head_stride // 4
        v_scales += kv_head * head_stride // 4
    if WINDOW > 0:
        begin = tl.maximum(first_at - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    else:
        begin = (first_at + 1) // BLOCK_N * BLOCK_N
        peak, total, acc = attend_keys(
            q_tile, q_at, peak, total, acc, 0, begin, table, k_pool, v_pool, k_scales, v_scales, block_stride,
            scale, softcap, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, WINDOW, HAS_SOFTCAP, IS_MASKED=False,
        )  # fmt: skip
    peak, total, acc = attend_keys(
        q_tile, q_at, peak, total, acc, begin, end, table, k_pool, v_pool, k_scales, v_scales, block_stride,
        scale, softcap, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, WINDOW, HAS_SOFTCAP, IS_MASKED=True,
    )  # fmt: skip
    if sinks is not None:
        sink = tl.load(sinks + heads).to(tl.float32) * LOG2E
        peak, total, acc = add_sink(peak, total, acc, sink)
    to = out + (tokens * out_stride + heads * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_row)


def attend_prefills(
    spec: AttentionSpec,
    q: Tensor,
    out: Tensor,
    pool: PoolView,
    tiles: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
) -> None:
    """Write the rows of `out` [T, H, D] that belong to `tiles` [N, 2] int32, as list_tiles lists them."""
    dim = spec.head_dim
    shape = tile_shape(dim, q.dtype.itemsize)
    _prefill_kernel[(tiles.shape[0], spec.num_kv_heads)](
        q,
        out,
        pool.k,
        pool.v,
        pool.k_scales,
        pool.v_scales,
        spec.sinks,
        tiles,
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
        GROUP=spec.num_heads // spec.num_kv_heads,
        HEAD_DIM=dim,
        BLOCK_SIZE=pool.block_size,
        BLOCK_M=shape.rows,
        BLOCK_N=shape.keys,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        WINDOW=spec.window or 0,
        HAS_SOFTCAP=spec.softcap is not None,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
