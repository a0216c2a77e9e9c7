"""Attention of one slice at a time: its blocks are gathered.

Then it is torch's fused attention, or plain operations for softcap and sinks. Used on devices without a kernel. Engine
thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from engine.runtime.kv_layout import AttentionSpec, from_pool
from engine.runtime.transfer import to_device


class SliceView(NamedTuple):
    """One slice's queries and visible keys; key positions are relative to the first one."""

    row: int  # of its first query in the batch
    num_queries: int
    num_keys: int
    offset: int  # of the first visible key in the gathered blocks
    blocks: Tensor  # [B] int64, to gather
    mask: Tensor | None  # [num_queries, num_keys] bool, True is visible; None for all, or the plain causal part


def view_slice(
    row: int,
    num_queries: int,
    context: int,
    table: Sequence[int],
    block_size: int,
    window: int | None,
    device: torch.device,
    ends: Tensor | None = None,
) -> SliceView:
    """Plan one slice whose last query sees `context` positions, less what a window hides; `ends` are a batch's."""
    start = context - num_queries
    first = 0 if window is None else max(0, start - window + 1)
    first_block = first // block_size
    blocks = np.asarray(table[first_block : -(-context // block_size)]).tolist()
    num_keys = context - first
    return SliceView(
        row,
        num_queries,
        num_keys,
        first - first_block * block_size,
        to_device(blocks, torch.int64, device),
        _mask(num_queries, num_keys, start - first, window, device, None if ends is None else ends - first),
    )


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
