"""The reference: paged attention by its definition, one slice at a time, in float64.

Every backend is tested against it. It reads exactly the positions that a query may see, through the block table,
so nothing stale in the pool can reach a result. Any device, engine thread; slow on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from engine.runtime.attention import BACKENDS
from engine.runtime.attention.backend import AttentionBackend, BackendCapabilities
from engine.runtime.kv_layout import AttentionSpec, from_pool, store


def dense_attention(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, start: int, ends: Tensor | None = None
) -> Tensor:
    """Return attention of q [T, H, D] at positions from `start` over k [start + T, Hkv, D] and v [start + T, Hkv, Dv].

    A query sees keys before its end in `ends` [T], by default those up to its own. Computed in float64; the result [T, H, Dv] has q's dtype.
    """
    group = spec.num_heads // spec.num_kv_heads
    wide_k, wide_v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), wide_k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    query_at = torch.arange(start, start + q.shape[0], device=q.device)[:, None]
    key_at = torch.arange(k.shape[0], device=q.device)[None, :]
    is_visible = key_at <= query_at if ends is None else key_at < ends[:, None]
    if spec.seen is not None:
        is_visible &= key_at > query_at - spec.seen
    scores = scores.masked_fill(~is_visible, -torch.inf)
    if spec.sinks is not None:
        sinks = spec.sinks.double()[:, None, None].expand(-1, q.shape[0], 1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, wide_v).to(q.dtype)


class ReferenceAttention(AttentionBackend):
    """A backend that gathers each slice's rows."""

    capabilities = BackendCapabilities(both_ways=True)

    def attend(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        batch = self.batch
        store(spec, batch.kv_slots, k, v, k_pool, v_pool)
        pieces, row = [], 0
        for num_queries, context, table in zip(
            batch.query_lens_host, batch.context_lens_host, batch.block_tables_host, strict=True
        ):
            size, start = k_pool.shape[2], context - num_queries
            first = 0 if spec.seen is None else max(start - spec.seen + 1, 0) // size  # block
            num_keys, num_blocks = context - first * size, -(-context // size)
            blocks = torch.tensor(table[first:num_blocks], device=q.device)
            pools = (k_pool, v_pool)[: spec.num_pools]
            rows = (pool[blocks].transpose(1, 2).flatten(0, 1)[:num_keys] for pool in pools)
            keys, *rest = (from_pool(each, q.dtype, spec.value_dim) for each in rows)
            values = rest[0] if rest else keys[..., : spec.out_dim]
            queries = q[row : row + num_queries]
            ends = batch.ends_of(spec)
            ends = None if ends is None else ends[row : row + num_queries] - first * size
            pieces.append(dense_attention(spec, queries, keys, values, num_keys - num_queries, ends))
            row += num_queries
        return torch.cat(pieces)


@contextmanager
def reference_attention() -> Iterator[None]:
    """Have engines that are built meanwhile with --attention-backend torch attend by the definition."""
    with patch.dict(BACKENDS, torch="tests.reference_attention:ReferenceAttention"):
        yield
