"""The base class of attention backends, what each can do, and the batch they work on.

Backends read and write the layout of kv_layout.py; everything above them knows blocks and slots only. One `prepare` per
step lets a backend build its metadata once for all layers. Knows no model. Engine thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from engine.runtime.kv_layout import AttentionSpec, StateTensors, StepStates


@dataclass(slots=True)
class Batch:
    """One step's flat token batch: T tokens of S slices, no padding; made by batch.py.

    Tensors live on the model's device; the lists are the same facts on the host, for code that must branch on them.
    """

    ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    kv_slots: Tensor  # [T] int64, block * block_size + offset: where each token's K and V go
    block_tables: (
        Tensor  # [S, widest] int32; entries after a context's blocks, and before a group's windows, are undefined
    )
    query_starts: Tensor  # [S + 1] int32, slice s owns tokens query_starts[s] .. query_starts[s + 1] - 1
    context_lens: Tensor  # [S] int32, positions visible to the slice's last token, itself included
    sample_rows: Tensor  # [R] int64, the tokens whose hidden state goes through the LM head
    query_lens_host: Sequence[int]
    context_lens_host: Sequence[int]
    block_tables_host: Sequence[Sequence[int]]
    others: Sequence[Batch] = ()  # the same tokens in each further group of layers, with other slots and tables
    states: StepStates | None = None  # of a model with recurrent layers
    state_tensors: StateTensors | None = None  # the same, of a graph, which has them on the device alone
    ends: Tensor | None = None  # [T] int32, where the positions end that a token sees; None: behind its own
    reaches: dict[int, Tensor] = field(default_factory=dict)  # the same in layers with a reach

    def ends_of(self, spec: AttentionSpec) -> Tensor | None:
        """Return the ends that a layer honours."""
        if spec.is_causal or self.ends is None or spec.reach is None:
            return None if spec.is_causal else self.ends
        if spec.reach not in self.reaches:
            self.reaches[spec.reach] = torch.minimum(self.ends, self.positions.int() + spec.reach + 1)
        return self.reaches[spec.reach]

    def of_group(self, kv_slots: Tensor, tables: Tensor, tables_host: Sequence[Sequence[int]]) -> Batch:
        """Return the same tokens with the slots and tables of another group."""
        return replace(self, kv_slots=kv_slots, block_tables=tables, block_tables_host=tables_host, others=())


class Rotation(NamedTuple):
    """The steps between the projection of queries and keys, and attention."""

    norms: tuple[Tensor, Tensor] | None  # weights [head_dim] of an RMSNorm of every query head, and every key head
    eps: float
    angles: tuple[Tensor, Tensor] | None  # cos and signed sin [T, rope_dim], as Rotary makes them


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendCapabilities:
    """What a backend can do beyond `attend`; declared once, asked at build time."""

    graphs: bool = False  # may be captured in a CUDA graph once prepared
    rotates: bool = False  # norms, rotates and stores in one pass: `rotate_and_attend`
    native: bool = False  # the native library attends by itself: `paged_layer`
    both_ways: bool = False  # honours the `ends` of a batch


class AttentionBackend(ABC):
    """Paged attention over one pool of K/V blocks."""

    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities()
    batch: Batch  # the step's, once it is prepared

    def check(self, spec: AttentionSpec, dtype: torch.dtype) -> None:  # noqa: B027 - not abstract: most backends take every layer
        """Raise ConfigError for a layer and pool that the backend has no kernel for."""

    def prepare(self, batch: Batch) -> None:
        """Build what all layers of this step share."""
        self.batch = batch

    @abstractmethod
    def attend(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        """Store k, v [T, kv heads, head_dim], then attend: q and the result [T, heads, head_dim].

        A layer of latents stores k alone, does not read v and v_pool, and returns [T, heads, value_dim]. One that reads
        the state of another stores nothing: that layer has.
        """

    def rotate_and_attend(
        self, spec: AttentionSpec, qkv: Tensor, rotation: Rotation, k_pool: Tensor, v_pool: Tensor
    ) -> Tensor:
        """Attend from the projection: qkv [T, query, key and value heads, head_dim]."""
        raise NotImplementedError  # called where `capabilities.rotates` alone

    def paged_layer(self, spec: AttentionSpec, k_pool: Tensor, v_pool: Tensor) -> Any:
        """Return the PagedLayer of the native library: a layer's pool and the step."""
        raise NotImplementedError  # called where `capabilities.native` alone

    def another(self) -> AttentionBackend:
        """Return a backend like this one, for the batch of another group of layers."""
        return type(self)()
