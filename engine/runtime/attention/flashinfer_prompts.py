"""Prompt attention by FlashInfer, whose HND pages have the layout of our pool.

It plans on the host, once a step for each kind of layer, and keeps the plan in pinned memory that the device reads
later. With overlap the next step is planned while this one runs, so two wrappers alternate. It compiles its kernels
with nvcc on the first call, unless they are packaged; the check at the start does that. Its decodes need a plan before
every replay of a graph, so decodes use our kernels. Engine thread.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from engine.runtime.attention.backend import Batch
from engine.runtime.attention.prompt_library import HALVES
from engine.runtime.kv_layout import AttentionSpec

_HEAD_DIMS = (64, 128, 256)
_WORKSPACE_BYTES = 128 << 20  # as its documentation advises


def absence(device: torch.device) -> str | None:
    """Return why it cannot run here, as the end of a sentence; None if it can."""
    if find_spec("flashinfer") is None:
        return "needs the package flashinfer, which is not installed"
    return None if device.type == "cuda" else "needs a CUDA device"


class FlashInferPrompts:
    """See PromptLibrary."""

    name = "flashinfer"

    def __init__(self, device: torch.device) -> None:
        self._wrap = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: list[dict[tuple[object, ...], Any]] = [{}, {}]  # by kind of layer

    def refusal(self, spec: AttentionSpec, dtype: torch.dtype) -> str | None:
        """Return what it lacks: sinks need another kernel, narrow pools have a scale a head."""
        if dtype not in HALVES:
            return f"K/V of {str(dtype).removeprefix('torch.')}, with scales as ours"
        if spec.head_dim not in _HEAD_DIMS:
            return f"head_dim of {spec.head_dim}"
        return "attention sinks" if spec.sinks is not None else None

    def prepare(self, batch: Batch) -> None:
        """Switch to the other wrappers."""
        self._batch = batch
        self._planned: dict[tuple[object, ...], Any] = {}  # this step's
        self._wrappers.reverse()

    def attend(self, spec: AttentionSpec, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        """Plan for the first layer of a kind, then run."""
        kind = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale, spec.window, spec.softcap)
        if kind not in self._planned:
            self._planned[kind] = self._plan(kind, spec, q.dtype, k_pool.shape[2])
        out: Tensor = self._planned[kind].run(q.contiguous(), (k_pool, v_pool))
        return out

    def _plan(self, kind: tuple[object, ...], spec: AttentionSpec, dtype: torch.dtype, block_size: int) -> Any:
        batch, wrappers = self._batch, self._wrappers[0]
        if kind not in wrappers:
            wrappers[kind] = self._wrap(self._workspace, "HND")
        contexts = batch.context_lens_host
        widths = [-(-context // block_size) for context in contexts]
        blocks = [
            block for table, width in zip(batch.block_tables_host, widths, strict=True) for block in table[:width]
        ]
        wrappers[kind].plan(
            _ints([0, *accumulate(batch.query_lens_host)]),
            _ints([0, *accumulate(widths)]),
            _ints(blocks),
            _ints([(context - 1) % block_size + 1 for context in contexts]),
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            block_size,
            causal=True,
            sm_scale=spec.scale,
            window_left=-1 if spec.window is None else spec.window - 1,
            logits_soft_cap=spec.softcap,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        return wrappers[kind]


def _ints(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)
