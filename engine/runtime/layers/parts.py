"""The protocol of a layer's two parts, and the attention that a mixer calls.

A part makes its tensors when it is made, by a Maker, which names them and divides them among ranks; the maker's last load
completes it. Then the engine thread calls it. The torch operations of `__call__` define its arithmetic; the native library
may compute the same, if `describe` describes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.runtime.attention.backend import Rotation
from engine.runtime.kv_layout import DeviceState, StateSpec
from engine.runtime.layers.adapters import LayerAdapters
from engine.runtime.native.decoder import PagedStep
from engine.runtime.native.library import PartArgs

Angles = tuple[Tensor, Tensor]  # cos and signed sin of a step, from Rotary

# State, qkv [T, all heads, head_dim] as projected, and its rotation -> [T, num_heads, head_dim].
FromProjected = Callable[[int, Tensor, Rotation], Tensor]


class Slice(NamedTuple):
    """Rows of one sequence in a step with recurrent states."""

    first: int
    stop: int
    num_drafts: int  # last rows, before which the state is written
    num_replays: int  # accepted drafts of the step before, which come before its rows


class RecurrentState(Protocol):
    """One layer's recurrent state in the slots of a step; kv_cache.py binds it to the pool."""

    @property
    def slices(self) -> Sequence[Slice]:
        """Return the step's slices."""
        ...

    @property
    def on_device(self) -> DeviceState:
        """Return the state for kernels of its device."""
        ...

    def read(self, index: int) -> list[Tensor]:
        """Return copies of what a slice reads: [pieces, *shape] for each kind of pieces; zeros at a sequence's beginning."""
        ...

    def write(self, index: int, pieces: Sequence[Tensor], *, brings_up: bool = False) -> None:
        """Write what a slice leaves; with `brings_up` where it has read, as it is after the replays."""
        ...

    def drafts(self, index: int) -> Tensor:
        """Return the memory of a slice's drafts, until its row's next step: [most drafts, width] in the model's type."""
        ...


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


class LayerStates(LayerAttention, Protocol):
    """Attention, and the states of layers that do not attend."""

    def recurrent(self, layer: int) -> RecurrentState:
        """Return the state of a layer."""
        ...


class Mixer(Protocol):
    """The part of a layer in which a token sees others."""

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """Return what it keeps: K and V of each token, or a latent, or a recurrent state."""
        ...

    def __call__(
        self, x: Tensor, angles: Angles | None, attention: LayerStates, adapters: LayerAdapters | None
    ) -> Tensor:
        """Return [T, hidden] of normed x [T, hidden]; `angles` are None in a layer without positions."""
        ...

    def describe(self) -> PartArgs | None:
        """Describe the loaded part to the native library; return None if that cannot compute it."""
        ...


class Attending(Mixer, Protocol):
    """A mixer that keeps keys and values of each token."""

    def attend(
        self, x: Tensor, angles: Angles | None, attention: LayerStates, adapters: LayerAdapters | None
    ) -> object:
        """Store the keys and values of x, and attend; the first half of a call."""
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
