"""Times paged attention on the device: batches that decode, and whole prompts.

A call of the backend also stores the new K and V. Blocks are in random order, as after some time of serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engine.runtime.attention.backend import Batch
from engine.runtime.kv_layout import SCALE_BYTES, AttentionSpec, pool_shape
from tools.gpu import names
from tools.gpu.figures import Figure
from tools.gpu.limits import attention_flops
from tools.gpu.task import Task
from tools.gpu.timing import median_s, num_copies

if TYPE_CHECKING:
    from engine.runtime.cuda.attention_tuning import Tuning

_BLOCK_SIZE = 16
_KV_HEADS, _HEAD_DIM = 8, 128


class Decode(NamedTuple):
    """A batch that decodes; `kv` is the format of K and V, "" for bfloat16."""

    heads: int
    batch: int
    context: int
    kv: str = ""


class Prefill(NamedTuple):
    """Whole prompts of one length."""

    heads: int
    num: int
    length: int


class Latents(NamedTuple):
    """A batch that decodes over latents, or prompts."""

    heads: int
    batch: int
    context: int
    is_prompt: bool = False


LATENTS = (
    *(Latents(heads, batch, 4096) for heads in (16, 128) for batch in (1, 32, 128)),
    *(Latents(heads, 1, 8192, is_prompt=True) for heads in (16, 128)),
)
DECODES = (
    *(Decode(32, batch, context) for batch, context in ((1, 1024), (1, 8192), (32, 1024), (256, 1024))),
    *(Decode(32, 128, context) for context in (1024, 4096, 8192)),
    *(Decode(32, 128, context, kv) for kv in ("int8", "fp8") for context in (1024, 8192)),
    *(Decode(16, batch, 1024) for batch in (1, 128, 256)),
)
PREFILLS = (*(Prefill(heads, num, length) for heads in (32, 16) for num, length in ((8, 1024), (1, 8192))),)


def time_decode(task: Task, device: torch.device, case: Decode) -> None:
    """Measure the GB/s of the K and V that are read."""
    kv_heads, dim = _heads(task)
    num_bytes = 2 * case.batch * case.context * kv_heads * (dim + SCALE_BYTES if case.kv else 2 * dim)
    lens = [1] * case.batch, [case.context] * case.batch
    seconds = attend_s(device, case.heads, kv_heads, dim, *lens, num_copies(num_bytes), case.kv)
    limit = task.rates().copy_bytes_per_s / 1e9
    task.notebook.figure(Figure(names.decode_attention(*case), num_bytes / seconds / 1e9, "GB/s", limit))


def time_prefill(task: Task, device: torch.device, case: Prefill) -> None:
    """Measure the TFLOP/s of the two products below the diagonal."""
    kv_heads, dim = _heads(task)
    lens = [case.length] * case.num
    seconds = attend_s(device, case.heads, kv_heads, dim, lens, lens, 1)
    limit = task.rates().bf16_flops / 1e12
    rate = attention_flops(case.heads, dim, lens) / seconds / 1e12
    task.notebook.figure(Figure(names.prefill_attention(*case), rate, "TFLOP/s", limit))


def time_latents(task: Task, device: torch.device, case: Latents) -> None:
    """Measure the GB/s of the latents that decodes read, or the TFLOP/s of prompts."""
    from engine.runtime.attention.triton_paged import TritonPagedAttention

    dim, rank = (24, 16) if task.is_rehearsal else (576, 512)
    contexts, queries = [case.context] * case.batch, [case.context if case.is_prompt else 1] * case.batch
    num_bytes = 2 * dim * sum(contexts)
    spec, backend = AttentionSpec(case.heads, 1, dim, dim**-0.5, value_dim=rank), TritonPagedAttention()
    batch = _batch(device, queries, contexts)
    shape = pool_shape(spec, batch.block_tables.numel(), _BLOCK_SIZE)
    pools = [_random(shape, device) for _ in range(1 if case.is_prompt else num_copies(num_bytes))]
    q, k = _random((sum(queries), case.heads, dim), device), _random((sum(queries), 1, dim), device)
    backend.prepare(batch)
    if not bool(backend.attend(spec, q, k, k, pools[0], pools[0]).isfinite().all()):
        raise RuntimeError("the result is not finite")
    seconds = median_s([partial(backend.attend, spec, q, k, k, pool, pool) for pool in pools])
    name = f"latents, {case.heads} heads, {case.batch} {'prompts' if case.is_prompt else 'decodes'} of {case.context}"
    if case.is_prompt:
        rate = attention_flops(case.heads, (dim + rank) // 2, contexts) / seconds / 1e12
        task.notebook.figure(Figure(name, rate, "TFLOP/s", task.rates().bf16_flops / 1e12))
    else:
        limit = task.rates().copy_bytes_per_s / 1e9
        task.notebook.figure(Figure(name, num_bytes / seconds / 1e9, "GB/s", limit))


def _heads(task: Task) -> tuple[int, int]:
    return (2, 16) if task.is_rehearsal else (_KV_HEADS, _HEAD_DIM)


def attend_s(
    device: torch.device,
    heads: int,
    kv_heads: int,
    dim: int,
    queries: list[int],
    contexts: list[int],
    copies: int,
    kv: str = "",
    tuning: Tuning | None = None,
) -> float:
    """Return the seconds of a call, which uses one of `copies` pools in turn."""
    # Here, because it imports Triton, whose interpreter a rehearsal must choose first.
    from engine.runtime.attention.triton_paged import TritonPagedAttention

    backend = TritonPagedAttention(tuning)
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5)
    batch = _batch(device, queries, contexts)
    shape = pool_shape(spec, batch.block_tables.numel(), _BLOCK_SIZE)
    pools = [[_narrow(shape, kv, device) if kv else _random(shape, device) for _ in "kv"] for _ in range(copies)]
    q = _random((sum(queries), heads, dim), device)
    k, v = (_random((sum(queries), kv_heads, dim), device) for _ in "kv")
    backend.prepare(batch)
    out = backend.attend(spec, q, k, v, *pools[0])
    if not bool(out.isfinite().all()):
        raise RuntimeError("the result is not finite")
    return median_s([partial(backend.attend, spec, q, k, v, *pool) for pool in pools])


def _random(shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.randn(tuple(shape), dtype=torch.bfloat16, device=device)


def _narrow(shape: Sequence[int], kv: str, device: torch.device) -> Tensor:
    """Return a pool of one number; the values do not affect the speed."""
    pool = torch.full((*shape[:-1], shape[-1] + SCALE_BYTES), 0x3C, dtype=torch.int8, device=device)
    return pool.view(torch.float8_e4m3fn) if kv == "fp8" else pool


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
        kv_slots=column(slots, torch.int64),
        block_tables=tables.to(device, torch.int32),
        query_starts=column(starts, torch.int32),
        context_lens=column(contexts, torch.int32),
        sample_rows=column([end - 1 for end in starts[1:]], torch.int64),
        query_lens_host=queries,
        context_lens_host=contexts,
        block_tables_host=tables.tolist(),
    )
