"""The CUDA backend: Triton kernels over the paged pool.

There is one launch for decodes and one for prompts. `prepare` sorts the slices once a step. A step of single queries
consists of kernels alone, which read the batch's tensors, so it can be captured in a CUDA graph and replayed with other
contents. The host's context lengths decide only how contexts are split. Prompt tiles depend on a layer's heads and
window, so they are listed for the first layer of a kind and copied from pinned memory. Nothing waits for the device.
Engine thread.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from engine.core.errors import ConfigError
from engine.runtime.attention.backend import AttentionBackend, BackendCapabilities, Batch, Rotation
from engine.runtime.cuda.attention_decode import attend_decodes, choose_splits
from engine.runtime.cuda.attention_latent import attend_latent_decodes, attend_latent_prefills
from engine.runtime.cuda.attention_prefill import WorkTensors, attend_prefills, choose_tile, list_work
from engine.runtime.cuda.attention_tuning import (
    Cut,
    LatentTuning,
    PromptTile,
    Tuning,
    choose_latent_tuning,
    choose_tuning,
)
from engine.runtime.cuda.rope_store import rotate_and_store
from engine.runtime.cuda.store import PoolView, store_kv, view_pool
from engine.runtime.kv_layout import PEAKS, AttentionSpec
from engine.runtime.transfer import to_device

MAX_HEAD_DIM = 512
MAX_LATENT_DIM = 512
_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


class _Tensors(NamedTuple):
    """The step's index tensors as the kernels read them."""

    kv_slots: Tensor  # [T] int64
    query_starts: Tensor  # [S + 1] int32
    context_lens: Tensor  # [S] int32
    block_tables: Tensor  # [S, width] int32


class _Step(NamedTuple):
    """The state that all layers of a step share."""

    batch: Batch
    tensors: _Tensors
    num_decodes: int
    longest_decode: int  # context
    decodes: Tensor  # int32, the slices with one query, then undefined entries
    prefills: list[int]  # all others
    longest_prefill: int  # queries
    work: dict[tuple[object, ...], WorkTensors]  # of the prefills, by everything it depends on


class _Device(NamedTuple):
    """The properties of the device that determine the kernels' sizes."""

    num_sms: int
    capability: tuple[int, int]


class TritonPagedAttention(AttentionBackend):
    """Decodes are cut into splits, prompts into tiles."""

    capabilities = BackendCapabilities(graphs=True, rotates=True)

    def __init__(self, tuning: Tuning | None = None, latent_tuning: LatentTuning | None = None) -> None:
        """Tunings replace the table's sizes."""
        self._tuning, self._latent_tuning = tuning, latent_tuning

    def check(self, spec: AttentionSpec, dtype: torch.dtype) -> None:
        largest = MAX_LATENT_DIM if spec.is_latent else MAX_HEAD_DIM
        if spec.out_dim > largest:
            raise ConfigError(
                f"--attention-backend 'triton' serves {'latents' if spec.is_latent else 'a head_dim'} of at most "
                f"{largest}, and the model's is {spec.out_dim}; use 'torch'."
            )
        if dtype not in (*_DTYPES, *PEAKS):
            raise ConfigError(
                f"--attention-backend 'triton' serves {', '.join(_DTYPES.values())}, and --dtype makes K and V "
                f"{str(dtype).removeprefix('torch.')}; set another --dtype, or use 'torch'."
            )

    def another(self) -> TritonPagedAttention:
        return TritonPagedAttention(self._tuning, self._latent_tuning)

    def prepare(self, batch: Batch) -> None:
        """Separate decodes from prompts; tiles of prompts are made for the first layer."""
        device = batch.kv_slots.device
        self._device = _describe(device)
        lens = batch.query_lens_host
        tensors = _Tensors(batch.kv_slots, batch.query_starts, batch.context_lens, batch.block_tables)
        decodes = [s for s, length in enumerate(lens) if length == 1]
        prefills = [s for s, length in enumerate(lens) if length > 1]
        # If all slices have one query, the starts 0, 1, 2 ... are also the slices' numbers.
        listed = to_device(decodes, torch.int32, device) if prefills else batch.query_starts
        longest = max((batch.context_lens_host[s] for s in decodes), default=0)
        self._step = _Step(batch, tensors, len(decodes), longest, listed, prefills, max(lens, default=0), {})

    def attend(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        step = self._step
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        assert k_pool.dtype == v_pool.dtype
        if spec.is_latent:
            assert k_pool.dtype == q.dtype
            assert spec.num_kv_heads == 1
            pool = view_pool(k_pool, k_pool)
            if spec.source is None:
                store_kv(k, None, pool, step.tensors.kv_slots)
            return self._attend_latents(spec, q, pool, step)
        assert k_pool.dtype in (q.dtype, *PEAKS)
        pool = view_pool(k_pool, v_pool)
        if spec.source is None:
            store_kv(k, v, pool, step.tensors.kv_slots)
        return self._attend(spec, q, pool, step)

    def rotate_and_attend(
        self, spec: AttentionSpec, qkv: Tensor, rotation: Rotation, k_pool: Tensor, v_pool: Tensor
    ) -> Tensor:
        """Norm, rotate and store in one launch, then attend."""
        step = self._step
        norms, eps, angles = rotation
        pool = view_pool(k_pool, v_pool)
        q = rotate_and_store(qkv, angles, norms, eps, pool, step.tensors.kv_slots)
        return self._attend(spec, q, pool, step)

    def _attend(self, spec: AttentionSpec, q: Tensor, pool: PoolView, step: _Step) -> Tensor:
        tensors, device = step.tensors, self._device
        tuning = self._tuning or choose_tuning(
            spec.head_dim, q.dtype.itemsize, device.capability, has_narrow_pool=pool.k_scales is not None
        )
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if step.num_decodes:
            visible = min(step.longest_decode, spec.window or step.longest_decode)
            num_programs = step.num_decodes * spec.num_kv_heads
            splits = choose_splits(num_programs, visible, device.num_sms, tuning.decode_cut)
            attend_decodes(
                spec, q, out, pool, step.decodes, *tensors[1:], num=step.num_decodes, splits=splits, tile=tuning.decode
            )
        if step.prefills:
            tile = choose_tile(tuning, step.longest_prefill, spec.num_heads // spec.num_kv_heads)
            work = _work(step, spec, tile, tuning.prompt_cut, device.num_sms)
            attend_prefills(spec, q, out, pool, work, *tensors[1:], tile=tile)
        return out

    def _attend_latents(self, spec: AttentionSpec, q: Tensor, pool: PoolView, step: _Step) -> Tensor:
        tensors, device = step.tensors, self._device
        tuning = self._latent_tuning or choose_latent_tuning(spec.num_heads, q.dtype.itemsize, device.capability)
        out = torch.empty((*q.shape[:2], spec.out_dim), dtype=q.dtype, device=q.device)
        if step.num_decodes:
            num_programs = step.num_decodes * -(-spec.num_heads // tuning.decode.rows)
            splits = choose_splits(num_programs, step.longest_decode, device.num_sms, tuning.decode_cut)
            attend_latent_decodes(
                spec, q, out, pool, step.decodes, *tensors[1:], num=step.num_decodes, splits=splits, tile=tuning.decode
            )
        if step.prefills:
            work = _work(step, spec, tuning.prompt, tuning.prompt_cut, device.num_sms)
            attend_latent_prefills(spec, q, out, pool, work, *tensors[1:], tile=tuning.prompt)
        return out


def _work(step: _Step, spec: AttentionSpec, tile: PromptTile, cut: Cut, num_sms: int) -> WorkTensors:
    key = spec.num_heads, spec.num_kv_heads, spec.window, tile
    if key not in step.work:
        lens, contexts = step.batch.query_lens_host, step.batch.context_lens_host
        work = list_work(step.prefills, lens, contexts, spec, tile, cut, num_sms)
        device = step.tensors.kv_slots.device
        pieces, cut_tiles = (to_device(x, torch.int32, device) for x in (work.pieces, work.cut_tiles))
        step.work[key] = WorkTensors(pieces, cut_tiles, work.num_parts)
    return step.work[key]


@cache
def _describe(device: torch.device) -> _Device:
    """Describe the device; the interpreter is one multiprocessor, of no generation."""
    if device.type != "cuda":
        return _Device(1, (0, 0))
    properties = torch.cuda.get_device_properties(device)
    return _Device(properties.multi_processor_count, (properties.major, properties.minor))
