"""The protocol of a layer's two parts, and the attention that a mixer calls.

A part makes its tensors when it is made, by a Maker, which names them and divides them among ranks; the maker's last load
completes it. Then the engine thread calls it. The torch operations of `__call__` define its arithmetic; the native library
may compute the same, if `describe` describes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from engine.runtime.attention.backend import Rotation
from engine.runtime.kv_layout import AttentionSpec
from engine.runtime.layers.adapters import LayerAdapters
from engine.runtime.native.decoder import PagedStep
from engine.runtime.native.library import PartArgs

Angles = tuple[Tensor, Tensor]  # cos and signed sin of a step, from Rotary

# State, qkv [T, all heads, head_dim] as projected, and its rotation -> [T, num_heads, head_dim].
FromProjected = Callable[[int, Tensor, Rotation], Tensor]


class LayerAttention(Protocol):
    """Attention over the step's batch and one state of the model; kv_cache.py binds it to the pool."""

    @property
    def from_projected(self) -> FromProjected | None:
        """Return attention that rotates in the backend; None if the backend cannot."""
        ...

    @property
    def paged_step(self) -> PagedStep | None:
        """Return the pool and step for the native library; None with another backend."""
        ...

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, num_heads, head_dim]; k, v [T, num_kv_heads, head_dim], rotated; returns [T, num_heads, head_dim]."""
        ...


class Mixer(Protocol):
    """The part of a layer in which a token sees others."""

    @property
    def states(self) -> tuple[AttentionSpec, ...]:
        """Return what it keeps of each token: K and V, or a latent."""
        ...

    def __call__(
        self, x: Tensor, angles: Angles | None, attention: LayerAttention, adapters: LayerAdapters | None
    ) -> Tensor:
        """Return [T, hidden] of normed x [T, hidden]; `angles` are None in a layer without positions."""
        ...

    def describe(self) -> PartArgs | None:
        """Describe the loaded part to the native library; return None if that cannot compute it."""
        ...


class FeedForward(Protocol):
    """The part of a layer that computes each token alone."""

    @property
    def is_capturable(self) -> bool:
        """Return whether a CUDA graph can hold the loaded part."""
        ...

    @property
    def lacking(self) -> str:
        """Return a matrix without which the native library cannot compute it; "" for none."""
        ...

    def __call__(self, x: Tensor, adapters: LayerAdapters | None) -> Tensor:
        """Return [T, hidden] of normed x [T, hidden]."""
        ...

    def describe(self) -> PartArgs | None:
        """Describe the loaded part to the native library; return None if that cannot compute it."""
        ...
