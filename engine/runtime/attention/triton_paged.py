"""The CUDA backend: Triton kernels that attend in the paged pool, one launch for all decodes and one for all prompts.

`prepare` lists once a step which slices are which. A step of single queries alone takes nothing but kernels, which read
the batch's own tensors: it may be captured in a CUDA graph, and replayed on whatever these say then. The host's context
lengths decide only how fine contexts are cut. Prompt tiles depend on the heads that share a kv head, so they are listed
when the first layer with a given number asks; they travel from pinned memory. Nothing waits for the device. Engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.core.errors import ConfigError
from engine.runtime.attention.base import AttentionSpec, Batch, Rotation
from engine.runtime.attention.pool import PEAKS
from engine.runtime.cuda.attention_decode import attend_decodes, choose_splits
from engine.runtime.cuda.attention_prefill import attend_prefills, list_tiles, tile_shape
from engine.runtime.cuda.rope_store import rotate_and_store
from engine.runtime.cuda.store import PoolView, block_major_shape, copy_blocks, store_kv, view_pool

MAX_HEAD_DIM = 256


class _Tensors(NamedTuple):
    """The step's index tensors as the kernels read them."""

    slots: Tensor  # [T] int64
    query_starts: Tensor  # [S + 1] int32
    context_lens: Tensor  # [S] int32
    block_tables: Tensor  # [S, width] int32


class _Step(NamedTuple):
    """What all layers of a step share."""

    batch: Batch
    tensors: _Tensors
    num_decodes: int
    longest_decode: int  # context
    decodes: Tensor  # int32, the slices with one query, and then whatever
    prefills: list[int]  # all others
    tiles: dict[tuple[int, int], Tensor]  # of the prefills, by (heads that share a kv head, rows of a tile)


class TritonPagedAttention:
    """Block-major pool; decodes are cut into splits, prompts into tiles."""

    graph_safe = True

    def __init__(self) -> None:
        self._step: _Step | None = None
        self._copies: tuple[list[tuple[int, int]], Tensor] | None = None  # pairs, and the same on the device
        self._num_sms = 0  # until the first step

    def kv_shape(self, spec: AttentionSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Block-major. Raises ConfigError for a head_dim that the kernels are not made for."""
        if spec.head_dim > MAX_HEAD_DIM:
            raise ConfigError(
                f"--attention-backend 'triton' serves a head_dim of at most {MAX_HEAD_DIM}, and the model's is "
                f"{spec.head_dim}; use 'torch'."
            )
        return block_major_shape(spec, num_blocks, block_size)

    def copy_blocks(self, kv: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks at once. The pairs travel to the device once for all layers."""
        if self._copies is None or self._copies[0] != pairs:
            self._copies = list(pairs), _to_device(pairs, torch.int64, kv.device)
        sources, destinations = self._copies[1].unbind(1)
        copy_blocks(kv, sources, destinations)

    def paged_step(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Not the library's."""

    def prepare(self, batch: Batch) -> None:
        """Tell decodes from prompts; prompt tiles are listed when the first layer asks."""
        device = batch.slots.device
        self._num_sms = self._num_sms or _count_sms(device)
        lens = batch.query_lens_host
        tensors = _Tensors(batch.slots, batch.query_starts, batch.context_lens, batch.block_tables)
        decodes = [s for s, length in enumerate(lens) if length == 1]
        prefills = [s for s, length in enumerate(lens) if length > 1]
        # Where all have one query, the starts 0, 1, 2 ... are also the slices' own numbers.
        listed = _to_device(decodes, torch.int32, device) if prefills else batch.query_starts
        longest = max((batch.context_lens_host[s] for s in decodes), default=0)
        self._step = _Step(batch, tensors, len(decodes), longest, listed, prefills, {})

    def attend(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        """Store, then attend."""
        step = self._step
        assert step is not None, "prepare comes before attend"
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        assert k_pool.dtype == v_pool.dtype
        assert k_pool.dtype in (q.dtype, *PEAKS)
        pool = view_pool(k_pool, v_pool)
        store_kv(k, v, pool, step.tensors.slots)
        return self._attend(spec, q, pool, step)

    def rotate_and_attend(
        self, spec: AttentionSpec, qkv: Tensor, rotation: Rotation, k_pool: Tensor, v_pool: Tensor
    ) -> Tensor:
        """Norm, rotate and store in one launch, then attend."""
        step = self._step
        assert step is not None, "prepare comes before attend"
        norms, eps, angles = rotation
        pool = view_pool(k_pool, v_pool)
        q = rotate_and_store(qkv, angles, norms, eps, pool, step.tensors.slots)
        return self._attend(spec, q, pool, step)

    def _attend(self, spec: AttentionSpec, q: Tensor, pool: PoolView, step: _Step) -> Tensor:
        tensors = step.tensors
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if step.num_decodes:
            visible = min(step.longest_decode, spec.window or step.longest_decode)
            splits = choose_splits(step.num_decodes * spec.num_kv_heads, visible, self._num_sms)
            attend_decodes(spec, q, out, pool, step.decodes, *tensors[1:], num=step.num_decodes, splits=splits)
        if step.prefills:
            attend_prefills(spec, q, out, pool, _tiles(step, spec, q), *tensors[1:])
        return out


def _tiles(step: _Step, spec: AttentionSpec, q: Tensor) -> Tensor:
    key = spec.num_heads // spec.num_kv_heads, tile_shape(spec.head_dim, q.dtype.itemsize).rows
    if key not in step.tiles:
        batch = step.batch
        tiles = list_tiles(step.prefills, batch.query_lens_host, batch.context_lens_host, *key)
        step.tiles[key] = _to_device(tiles, torch.int32, q.device)
    return step.tiles[key]


def _count_sms(device: torch.device) -> int:
    """Multiprocessors; the interpreter is one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _to_device(numbers: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A copy that nobody waits for: pinned memory is not used again before the stream has passed."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
