"""The CPU backend in torch: decode steps as tiles of sequences, the rest slice by slice.

No context is padded to the longest. Few sequences, and long ones whose blocks are adjacent, are read through views of
the head-major pool; many go through tiles.py. Masks suffice because the values after a sequence's end in its last block
are finite: a block is zeroed when its first slot is written. Engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.runtime.attention.backend import AttentionBackend, Batch
from engine.runtime.attention.slices import SliceView, attend_slice, view_slice
from engine.runtime.attention.tiles import TILE_TOKENS, TileBatch, attend_tiles, cut_tiles
from engine.runtime.kv_layout import AttentionSpec, store

MIN_TILED = 6  # number of sequences from which one batch of tiles is faster than a fused call for each
MAX_TILED_RUN = 1024  # tokens from which reading adjacent blocks in place is faster than gathering them
MAX_GATHERED = 16_384  # tokens gathered at once, which bounds the workspace


class _Layout(NamedTuple):
    """One step's work for all layers with the same window."""

    views: list[SliceView]
    tiles: list[TileBatch]


class CpuPagedAttention(AttentionBackend):
    """Head-major pool, no gather-and-pad."""

    def prepare(self, batch: Batch) -> None:
        """Forget the last step; a layout is made when the first layer with a given window asks."""
        self.batch = batch
        self._layouts: dict[int | None, _Layout] = {}  # by window
        self._fresh: Tensor | None = None  # last blocks whose first slot this step writes

    def attend(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        """Store, then attend."""
        batch = self.batch
        if not self._layouts:
            self._fresh = _fresh_blocks(batch, k_pool.shape[2])
        if spec.window not in self._layouts:
            self._layouts[spec.window] = _lay_out(batch, k_pool.shape[2], spec.window)
        layout = self._layouts[spec.window]
        for pool, rows in ((k_pool, k), (v_pool, v))[: spec.num_pools]:
            if self._fresh is not None:
                pool.index_fill_(1, self._fresh, 0)
            store(spec, pool, batch.kv_slots, rows)
        out = q.new_empty((*q.shape[:2], spec.out_dim))
        for view in layout.views:
            out[view.row : view.row + view.num_queries] = attend_slice(spec, view, q, k_pool, v_pool)
        for tiles in layout.tiles:
            out.index_copy_(0, tiles.rows, attend_tiles(spec, tiles, q, k_pool, v_pool))
        return out


def _fresh_blocks(batch: Batch, block_size: int) -> Tensor | None:
    """Return the last blocks that this step begins but does not fill."""
    fresh = [
        table[(context - 1) // block_size]
        for num_queries, context, table in zip(
            batch.query_lens_host, batch.context_lens_host, batch.block_tables_host, strict=True
        )
        if 0 < context % block_size <= num_queries
    ]
    return torch.tensor(fresh, dtype=torch.int64) if fresh else None  # tables are int32


def _lay_out(batch: Batch, block_size: int, window: int | None) -> _Layout:
    """Decide which slices are tiled, and plan them all."""
    lens, contexts, tables = batch.query_lens_host, batch.context_lens_host, batch.block_tables_host
    visible = contexts if window is None else [min(context, window) for context in contexts]
    tiled = [
        s
        for s, length in enumerate(lens)
        if length == 1 and not _is_long_run(tables[s], contexts[s], visible[s], block_size)
    ]
    if len(tiled) < MIN_TILED:
        tiled = []
    starts = batch.query_starts.tolist()
    one_by_one = sorted(set(range(len(lens))) - set(tiled))
    views = [view_slice(starts[s], lens[s], contexts[s], tables[s], block_size, window, _CPU) for s in one_by_one]
    tiles = [
        cut_tiles([starts[s] for s in part], [contexts[s] for s in part], [tables[s] for s in part], block_size, window)
        for part in _portions(tiled, visible)
    ]
    return _Layout(views, tiles)


_CPU = torch.device("cpu")


def _is_long_run(table: Sequence[int], context: int, num_visible: int, block_size: int) -> bool:
    """Return whether many keys are visible and, judged by both ends, in adjacent blocks."""
    first, last = (context - num_visible) // block_size, (context - 1) // block_size
    return num_visible > MAX_TILED_RUN and table[last] - table[first] == last - first


def _portions(chosen: Sequence[int], visible: Sequence[int]) -> list[list[int]]:
    """Split slices into portions that gather at most MAX_GATHERED tokens, or one slice."""
    portions: list[list[int]] = []
    room = 0
    for s in chosen:
        need = visible[s] + TILE_TOKENS
        if not portions or need > room:
            portions.append([])
            room = MAX_GATHERED
        portions[-1].append(s)
        room -= need
    return portions
