"""Prompt attention by torch.nn.attention.varlen: FlashAttention-3, or cuDNN (torch 2.15).

Its pages are [page, position, kv head, head_dim], which our pool is with two axes exchanged, without a copy. torch has
had the argument for a block table since 2.12, but its own FlashAttention-2 refuses one. First chunks, which need no
pages, could use it with torch 2.11; published rates are no better than our kernel's, so they do not. Engine thread.
"""

from __future__ import annotations

from importlib.util import find_spec
from inspect import signature

import torch
from torch import Tensor

from engine.runtime.attention.backend import Batch
from engine.runtime.attention.prompt_library import HALVES
from engine.runtime.kv_layout import AttentionSpec

_FA3_MODULE = "flash_attn_interface"
_FIRST_CUDNN = 92_400  # with pages for causal attention of grouped heads
_MAX_CUDNN_HEAD_DIM = 128


def absence(device: torch.device) -> str | None:
    """Return why torch cannot do it here, as the end of a sentence; None if it can."""
    if device.type != "cuda":
        return "needs a CUDA device"
    if "block_table" not in signature(_varlen_attn()).parameters:
        return f"needs torch 2.12 or newer, and this is {torch.__version__}"
    if _has_fa3(device) or _has_cudnn(device):
        return None
    return (
        f"needs FlashAttention-3 (the module {_FA3_MODULE}, compute capability 9.x), or torch 2.15 with cuDNN 9.24 and "
        f"compute capability 9.0 or 10.x; this is torch {torch.__version__}"
    )


class TorchVarlen:
    """See PromptLibrary."""

    name = "torch_varlen"

    def __init__(self, device: torch.device) -> None:
        self._has_fa3 = _has_fa3(device)
        if self._has_fa3:
            torch.nn.attention.activate_flash_attention_impl("FA3")
        self._attend = _varlen_attn()

    def refusal(self, spec: AttentionSpec, dtype: torch.dtype) -> str | None:
        """Return what it lacks: soft caps and sinks, and with cuDNN windows too."""
        if dtype not in HALVES:
            return f"K/V of {str(dtype).removeprefix('torch.')}"
        if spec.softcap is not None or spec.sinks is not None:
            return "soft cap" if spec.softcap is not None else "attention sinks"
        if self._has_fa3:
            return None
        if spec.window is not None:
            return "sliding windows without FlashAttention-3"
        if spec.head_dim > _MAX_CUDNN_HEAD_DIM or spec.head_dim % 8:
            return f"head_dim of {spec.head_dim} without FlashAttention-3"
        return None

    def prepare(self, batch: Batch) -> None:
        """Keep the batch, which has everything that is needed."""
        self._batch = batch

    def attend(self, spec: AttentionSpec, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        """Attend in one call; a window of w is w - 1 keys to the left of a query."""
        batch = self._batch
        out: Tensor = self._attend(
            q,
            k_pool.transpose(1, 2),
            v_pool.transpose(1, 2),
            batch.query_starts,
            None,
            max(batch.query_lens_host),
            max(batch.context_lens_host),
            scale=spec.scale,
            window_size=(-1 if spec.window is None else spec.window - 1, 0),
            enable_gqa=spec.num_heads != spec.num_kv_heads,
            seqused_k=batch.context_lens,
            block_table=batch.block_tables,
        )
        return out


def _varlen_attn():  # type: ignore[no-untyped-def]  # its type is torch's, and differs from version to version
    from torch.nn.attention.varlen import varlen_attn  # missing before torch 2.10

    return varlen_attn


def _has_fa3(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9 and find_spec(_FA3_MODULE) is not None


def _has_cudnn(device: torch.device) -> bool:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    major, minor = torch.cuda.get_device_capability(device)
    is_card = (major, minor) == (9, 0) or major == 10
    return version >= (2, 15) and is_card and (torch.backends.cudnn.version() or 0) >= _FIRST_CUDNN
