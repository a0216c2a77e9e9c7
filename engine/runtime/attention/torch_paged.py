"""Paged attention on any device, in torch operations: one slice at a time.

The fallback without a kernel. Its cost grows with the number of slices, because each takes a few launches a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.runtime.attention.backend import AttentionBackend, BackendCapabilities, Batch
from engine.runtime.attention.slices import SliceView, attend_slice, view_slice
from engine.runtime.kv_layout import AttentionSpec, store


class TorchPagedAttention(AttentionBackend):
    """The blocks of each slice are gathered."""

    capabilities = BackendCapabilities(both_ways=True)

    def prepare(self, batch: Batch) -> None:
        """Forget the last step; views are made for the first layer with each window."""
        self.batch = batch
        self._views: dict[tuple[int | None, bool], list[SliceView]] = {}  # by window, and whether it is causal

    def attend(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        batch = self.batch
        store(spec, batch.kv_slots, k, v, k_pool, v_pool)
        kind = spec.seen, spec.is_causal
        if kind not in self._views:
            self._views[kind] = _view_all(batch, k_pool.shape[2], spec)
        return torch.cat([attend_slice(spec, view, q, k_pool, v_pool) for view in self._views[kind]])


def _view_all(batch: Batch, block_size: int, spec: AttentionSpec) -> list[SliceView]:
    views, row, all_ends = [], 0, batch.ends_of(spec)
    for num_queries, context, table in zip(
        batch.query_lens_host, batch.context_lens_host, batch.block_tables_host, strict=True
    ):
        ends = None if all_ends is None else all_ends[row : row + num_queries]
        views.append(view_slice(row, num_queries, context, table, block_size, spec.seen, batch.kv_slots.device, ends))
        row += num_queries
    return views
