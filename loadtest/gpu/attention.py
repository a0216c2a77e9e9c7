"""The time of paged attention on the device: batches that decode, and whole prompts.

Through the backend's own protocol, so a call also stores the new K and V, as it does when it serves: a few rows beside a
context. Blocks are handed out in random order, as they are after a while of serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from engine.runtime.attention.base import AttentionSpec, Batch
from engine.runtime.attention.table import load_backend
from loadtest.gpu import names
from loadtest.gpu.figures import Figure
from loadtest.gpu.shapes import attention_flops
from loadtest.gpu.task import Task
from loadtest.gpu.timing import median_s, num_copies

_BLOCK_SIZE = 16
_KV_HEADS, _HEAD_DIM = 8, 128
DECODES: tuple[tuple[int, int, int], ...] = (  # heads, batch, context
    (32, 1, 1024),
    (32, 1, 8192),
    (32, 32, 1024),
    (32, 128, 1024),
    (32, 128, 4096),
    (32, 128, 8192),
    (32, 256, 1024),
    (16, 1, 1024),
    (16, 128, 1024),
    (16, 256, 1024),
)
PREFILLS: tuple[tuple[int, list[int]], ...] = ((32, [1024] * 8), (32, [8192]), (16, [1024] * 8), (16, [8192]))


def time_decode(task: Task, device: torch.device, heads: int, batch: int, context: int) -> None:
    """GB/s of the K and V that are read."""
    kv_heads, dim = _heads(task)
    num_bytes = 2 * 2 * batch * context * kv_heads * dim
    seconds = _attend_s(device, heads, kv_heads, dim, [1] * batch, [context] * batch, num_copies(num_bytes))
    limit = task.rates().copy_bytes_per_s / 1e9
    task.notebook.figure(
        Figure(names.decode_attention(heads, batch, context), num_bytes / seconds / 1e9, "GB/s", limit)
    )


def time_prefill(task: Task, device: torch.device, heads: int, lens: list[int]) -> None:
    """TFLOP/s of the two products below the diagonal."""
    kv_heads, dim = _heads(task)
    seconds = _attend_s(device, heads, kv_heads, dim, lens, lens, 1)
    limit = task.rates().bf16_flops / 1e12
    rate = attention_flops(heads, dim, lens) / seconds / 1e12
    task.notebook.figure(Figure(names.prefill_attention(heads, len(lens), lens[0]), rate, "TFLOP/s", limit))


def _heads(task: Task) -> tuple[int, int]:
    return (2, 16) if task.is_rehearsal else (_KV_HEADS, _HEAD_DIM)


def _attend_s(
    device: torch.device, heads: int, kv_heads: int, dim: int, queries: list[int], contexts: list[int], copies: int
) -> float:
    backend = load_backend("triton", device)
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5)
    batch = _batch(device, queries, contexts)
    shape = backend.kv_shape(spec, batch.block_tables.numel(), _BLOCK_SIZE)
    pools = [[_random(shape, device) for _ in "kv"] for _ in range(copies)]
    q = _random((sum(queries), heads, dim), device)
    k, v = (_random((sum(queries), kv_heads, dim), device) for _ in "kv")
    backend.prepare(batch)
    out = backend.attend(spec, q, k, v, *pools[0])
    if not bool(out.isfinite().all()):
        raise RuntimeError("the result is not finite")
    return median_s([partial(backend.attend, spec, q, k, v, *pool) for pool in pools])


def _random(shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.randn(tuple(shape), dtype=torch.bfloat16, device=device)


def _batch(device: torch.device, queries: list[int], contexts: list[int]) -> Batch:
    width = -(-max(contexts) // _BLOCK_SIZE)
    tables = torch.randperm(len(contexts) * width).view(len(contexts), width)
    positions = [
        position
        for query, context in zip(queries, contexts, strict=True)
        for position in range(context - query, context)
    ]
    owners = [s for s, query in enumerate(queries) for _ in range(query)]
    slots = [
        int(tables[s, position // _BLOCK_SIZE]) * _BLOCK_SIZE + position % _BLOCK_SIZE
        for s, position in zip(owners, positions, strict=True)
    ]
    starts = [0, *accumulate(queries)]

    def column(values: list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Batch(
        ids=column([0] * len(slots), torch.int64),
        positions=column(positions, torch.int64),
        slots=column(slots, torch.int64),
        block_tables=tables.to(device, torch.int32),
        query_starts=column(starts, torch.int32),
        context_lens=column(contexts, torch.int32),
        sample_rows=column([end - 1 for end in starts[1:]], torch.int64),
        query_lens_host=queries,
        context_lens_host=contexts,
        block_tables_host=tables.tolist(),
    )
