"""Paged attention on any device, in torch operations: one slice at a time.

The fallback without a kernel. Its cost grows with the number of slices, because each takes a few launches a layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from engine.runtime.attention.backend import AttentionBackend, BackendCapabilities, Batch
from engine.runtime.kv_layout import AttentionSpec, from_pool, store
from engine.runtime.transfer import to_device


class SliceView(NamedTuple):
    """One slice's queries and visible keys; key positions are relative to the first one."""

    row: int  # of its first query in the batch
    num_queries: int
    num_keys: int
    offset: int  # of the first visible key in the gathered blocks
    blocks: Tensor  # [B] int64, to gather
    mask: Tensor | None  # [num_queries, num_keys] bool, True is visible; None for all, or the plain causal part


def _mask(
    num_queries: int, num_keys: int, start: int, window: int | None, device: torch.device, ends: Tensor | None
) -> Tensor | None:
    is_hiding = window is not None and num_keys > window
    if num_queries == 1 or (start == 0 and not is_hiding and ends is None):
        return None
    query_at = torch.arange(start, start + num_queries, device=device)[:, None]
    key_at = torch.arange(num_keys, device=device)
    mask = key_at <= query_at if ends is None else key_at < ends[:, None]
    return mask & (key_at > query_at - window) if is_hiding and window is not None else mask


def attend_slice(spec: AttentionSpec, view: SliceView, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
    """Return this slice's attention [num_queries, H, out_dim], from the batch's q [T, H, D]."""
    queries = q[view.row : view.row + view.num_queries]
    keys = from_pool(_read(k_pool, view), q.dtype, spec.value_dim)
    # The fused kernels want values as wide as keys: a latent is read whole, and the result cut.
    values = keys if spec.is_latent else from_pool(_read(v_pool, view), q.dtype)
    return _attend(spec, view, queries, keys, values)[..., : spec.out_dim]


def _attend(spec: AttentionSpec, view: SliceView, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    if spec.softcap is not None or spec.sinks is not None:
        return _plain(spec, view, queries, keys, values)
    group = spec.num_heads // spec.num_kv_heads
    if view.num_queries == 1:
        # The heads of a group are treated as queries: no head is repeated, and all keys are visible to each.
        grouped = queries.view(1, spec.num_kv_heads, group, spec.head_dim)
        out = F.scaled_dot_product_attention(grouped, keys[None], values[None], scale=spec.scale)
        return out.reshape(1, spec.num_heads, spec.head_dim)
    is_gqa = group > 1
    if is_gqa and queries.is_cuda:  # on CUDA, only kernels without masks support grouped heads
        keys, values, is_gqa = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0), False
    out = F.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=view.mask,
        is_causal=view.mask is None,
        scale=spec.scale,
        enable_gqa=is_gqa,
    )
    return out[0].transpose(0, 1)


def _read(pool: Tensor, view: SliceView) -> Tensor:
    """Return the slice's visible keys or values, [num_kv_heads, num_keys, head_dim]."""
    gathered = pool.transpose(0, 1).index_select(1, view.blocks)
    return gathered.flatten(1, 2)[:, view.offset : view.offset + view.num_keys]


def _plain(spec: AttentionSpec, view: SliceView, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute attention in float32, for features that the fused kernels lack."""
    num_queries, group = view.num_queries, spec.num_heads // spec.num_kv_heads
    grouped = queries.view(num_queries, spec.num_kv_heads, group, spec.head_dim).permute(1, 2, 0, 3)
    scores = torch.matmul(grouped.float(), keys.float()[:, None].mT) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if num_queries > 1:
        mask = view.mask
        if mask is None:
            mask = torch.ones(num_queries, view.num_keys, dtype=torch.bool, device=queries.device).tril()
        scores = scores.masked_fill(~mask, -torch.inf)
    if spec.sinks is not None:
        sinks = spec.sinks.float().view(spec.num_kv_heads, group, 1, 1).expand(-1, -1, num_queries, 1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    out = torch.matmul(weights, values.float()[:, None])
    return out.permute(2, 0, 1, 3).reshape(num_queries, spec.num_heads, spec.head_dim).to(queries.dtype)


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
    """Return each slice's view; the last query of one sees its context, less what a window hides."""
    views, row, all_ends, window, device = [], 0, batch.ends_of(spec), spec.seen, batch.kv_slots.device
    for num_queries, context, table in zip(
        batch.query_lens_host, batch.context_lens_host, batch.block_tables_host, strict=True
    ):
        start = context - num_queries
        first = 0 if window is None else max(0, start - window + 1)
        blocks = to_device(table[first // block_size : -(-context // block_size)], torch.int64, device)
        ends = None if all_ends is None else all_ends[row : row + num_queries] - first
        mask = _mask(num_queries, context - first, start - first, window, device, ends)
        views.append(SliceView(row, num_queries, context - first, first % block_size, blocks, mask))
        row += num_queries
    return views
