"""The protocol that every attention backend plugs into, and the batch it works on.

A backend owns the layout of the K/V pool; everything above it knows blocks and slots only. One `prepare` a step lets a
backend build its metadata once for all layers; the metadata is the backend's own, never a global.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.runtime.kv_layout import AttentionSpec
from engine.runtime.lora.adapter import AdapterRows, Target
from engine.runtime.native.decoder import PagedStep


@dataclass(slots=True)
class Batch:
    """One step's flat token batch: T tokens of S slices, no padding. Made by runtime/batch.py, nowhere else.

    Tensors live on the model's device; the lists are the same facts on the host, for code that must branch on them.
    """

    ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    kv_slots: Tensor  # [T] int64, block * block_size + offset: where each token's K and V go
    block_tables: Tensor  # [S, widest] int32; what stands behind the blocks that a context needs has no meaning
    query_starts: Tensor  # [S + 1] int32, slice s owns tokens query_starts[s] .. query_starts[s + 1] - 1
    context_lens: Tensor  # [S] int32, positions visible to the slice's last token, itself included
    sample_rows: Tensor  # [R] int64, the tokens whose hidden state goes through the LM head
    query_lens_host: Sequence[int]
    context_lens_host: Sequence[int]
    block_tables_host: Sequence[Sequence[int]]


class AttentionBackend(Protocol):
    """Paged attention over one pool of K/V blocks."""

    graph_safe: bool  # may be captured in a CUDA graph once prepared

    def kv_shape(self, spec: AttentionSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Shape of one layer's K (and of its V) tensor in this backend's layout, head_dim last.

        With int8 K/V the tensors are int8 and their last dimension is longer, as pool.py says.
        """
        ...

    def paged_step(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> PagedStep | None:
        """The pool of all layers and the step's metadata as the native library reads them, if this backend is its own."""
        ...

    def prepare(self, batch: Batch) -> None:
        """Build what all layers of this step share."""
        ...

    def attend(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        """Store k, v [T, num_kv_heads, head_dim] at the batch's slots, then attend: q and the result [T, num_heads, head_dim]."""
        ...


@runtime_checkable
class ParticularBackend(AttentionBackend, Protocol):
    """One that does not serve every model, and says so before the first step."""

    def check(self, spec: AttentionSpec, dtype: torch.dtype, block_size: int, device: torch.device) -> None:
        """Raise ConfigError for a layer, over a pool of `dtype`, that it has no kernel for."""
        ...


class Rotation(NamedTuple):
    """What queries and keys go through on their way from the projection to attention."""

    norms: tuple[Tensor, Tensor] | None  # weights [head_dim] of an RMSNorm of every query head, and every key head
    eps: float
    angles: tuple[Tensor, Tensor] | None  # cos and signed sin [T, rope_dim], as Rotary makes them


@runtime_checkable
class InterleavingBackend(AttentionBackend, Protocol):
    """One on a CPU whose head-major tensors need not be contiguous, so that a block of all layers can lie together."""

    interleaves: bool


@runtime_checkable
class RotatingBackend(AttentionBackend, Protocol):
    """One that norms, rotates and stores in one pass."""

    def rotate_and_attend(
        self, spec: AttentionSpec, qkv: Tensor, rotation: Rotation, k_pool: Tensor, v_pool: Tensor
    ) -> Tensor:
        """`attend`, from what was projected: qkv [T, query heads, key heads and value heads, head_dim]."""
        ...


# Layer, qkv [T, all heads, head_dim] as projected, and what it goes through -> [T, num_heads, head_dim].
FromProjected = Callable[[int, Tensor, Rotation], Tensor]


class LayerAttention(Protocol):
    """What a model sees: attention of one layer over the step's batch. runtime/kv_cache.py binds it to the pool."""

    @property
    def from_projected(self) -> FromProjected | None:
        """The same for a model that leaves a Rotation to the backend; None where it cannot."""
        ...

    @property
    def paged_step(self) -> PagedStep | None:
        """For a model that runs in the native library and attends there by itself; None where that cannot be."""
        ...

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, num_heads, head_dim]; k, v [T, num_kv_heads, head_dim], rotated; returns [T, num_heads, head_dim]."""
        ...


class CausalLM(Protocol):
    """What the runner needs of a model, its own or transformers'."""

    attention_specs: Sequence[AttentionSpec]  # one a layer
    vocab_size: int  # of the logits
    max_model_len: int  # positions the weights were made for
    dtype: torch.dtype
    graph_safe: bool  # whether its forward pass may be captured in a CUDA graph

    @property
    def is_native(self) -> bool:
        """Whether products run in the native library, on its threads: torch's would only be in their way."""
        ...

    def forward(self, ids: Tensor, positions: Tensor, attention: LayerAttention, rows: Tensor | None = None) -> Tensor:
        """ids, positions [T] -> the final, normed hidden states of `rows` [R] int64, or of all: [R, hidden]."""
        ...

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Hidden states [R, hidden] -> float32 logits [R, vocab_size], in `out` if it is given."""
        ...


@runtime_checkable
class AdaptableLM(CausalLM, Protocol):
    """One whose matrices adapters can change."""

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attention: LayerAttention,
        rows: Tensor | None = None,
        adapters: Sequence[AdapterRows] = (),
    ) -> Tensor:
        """The same, with what each adapter adds in its rows of the T; the bits of all others are as without."""
        ...

    def adapter_targets(self) -> Mapping[str, Target]:
        """The matrices that can be changed, by the names that checkpoints have for them."""
        ...
