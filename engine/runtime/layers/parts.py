"""The protocol of a layer's two parts, the maker of their tensors, and the attention that a mixer calls.

A part makes its tensors when it is made, by a Maker, which names them and divides them among ranks; the maker's last load
completes it. Then the engine thread calls it. The torch operations of `__call__` define its arithmetic; the native library
may compute the same, if `describe` describes it.

A model is made empty. Its parts name their tensors by the checkpoint's keys, and `loads` has them in the order in which
a step reads them, the head first; models/fill.py loads them in that order. Matrices get their memory only then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.runtime.activation import Activation
from engine.runtime.attention.backend import Rotation
from engine.runtime.kv_layout import DeviceState, StateSpec
from engine.runtime.layers.shards import REPLICATED, Division, Plan, Shards
from engine.runtime.native.library import PartArgs
from engine.runtime.native.ops import floats_of
from engine.runtime.native.parts import PagedStep
from engine.runtime.parallel.group import SINGLE, Group
from engine.runtime.schemes.linear import Addend, Bundle, Embedding, Linear, Matrix, Scheme, stored_rows
from engine.runtime.weights.checkpoint import Span, StoredTensor, cut


class AdaptedMatrix(IntEnum):
    """The matrices of a layer, as in lora.h."""

    QKV = 0
    O = 1  # noqa: E741 - its name in every checkpoint
    Q_B = 2  # of a latent of queries, or the gates of Gated DeltaNet
    GATE_UP = 3
    DOWN = 4
    BESIDE_QKV = 5  # of the second mixer of a layer, in the order of the first one's
    BESIDE_O = 6
    BESIDE_Q_B = 7


# The terms that a step's adapters add to the product of x with a matrix of one layer.
LayerAdapters = Callable[[AdaptedMatrix, Tensor], Sequence[Addend]]


class Target(NamedTuple):
    """The rows of a checkpoint's matrix in the model's matrix, which may be merged."""

    layer: int
    place: AdaptedMatrix
    first_row: int
    num_rows: int
    shape: tuple[int, int]  # of the merged matrix: outputs, inputs
    activation: Activation | None  # of its product
    row_order: Tensor | None = None  # the checkpoint's row in each row, if these are in another order, or are more
    input_order: Tensor | None = None  # likewise


def adapted(linear: Linear, place: AdaptedMatrix, x: Tensor, adapters: LayerAdapters | None) -> Tensor:
    """Return the product of x with the matrix at a place, with the terms of adapters."""
    return linear(x) if adapters is None else linear(x, adapters(place, x))


def summed(linear: Linear, place: AdaptedMatrix, x: Tensor, adapters: LayerAdapters | None, group: Group) -> Tensor:
    """Return the product with a matrix at a place, of which each rank has the part for its part of x."""
    y = adapted(linear, place, x, adapters)
    group.all_reduce(y)
    return y


def beside(adapters: LayerAdapters | None) -> LayerAdapters | None:
    """Return the terms for the second mixer of a layer, which calls its matrices as the first one does."""
    if adapters is None:
        return None
    return lambda place, x: adapters(AdaptedMatrix(place + AdaptedMatrix.BESIDE_QKV), x)


Angles = tuple[Tensor, Tensor]  # cos and signed sin of a step, from Rotary

# State, qkv [T, all heads, head_dim] as projected, and its rotation -> [T, num_heads, head_dim].
FromProjected = Callable[[int, Tensor, Rotation], Tensor]


class Slice(NamedTuple):
    """Rows of one sequence in a step with recurrent states."""

    first: int
    stop: int
    num_drafts: int  # last rows, before which the state is written
    num_replays: int  # accepted drafts of the step before, which come before its rows
    midway_after: int = 0  # tokens, replays included, after which the state is written to another slot as well


class RecurrentState(Protocol):
    """One layer's recurrent state in the slots of a step; kv_cache.py binds it to the pool."""

    @property
    def slices(self) -> Sequence[Slice]:
        """Return the step's slices."""

    @property
    def on_device(self) -> DeviceState:
        """Return the state for kernels of its device."""

    def read(self, index: int) -> list[Tensor]:
        """Return copies of what a slice reads: [pieces, *shape] for each kind of pieces; zeros at a sequence's beginning."""

    def write(self, index: int, pieces: Sequence[Tensor], *, midway: bool = False) -> None:
        """Write what a slice leaves, or with `midway` what it is `midway_after` tokens."""

    def drafts(self, index: int) -> Tensor:
        """Return the memory of a slice's drafts, until its row's next step: [most drafts, width] in the model's type."""


class LayerAttention(Protocol):
    """Attention over the step's batch and one state of the model; kv_cache.py binds it to the pool."""

    @property
    def from_projected(self) -> FromProjected | None:
        """Return attention that rotates in the backend; None if the backend cannot."""

    @property
    def paged_step(self) -> PagedStep | None:
        """Return the pool and step for the native library; None with another backend."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, num_heads, head_dim]; k, v [T, num_kv_heads, head_dim], rotated; returns [T, num_heads, head_dim]."""


class LayerStates(LayerAttention, Protocol):
    """Attention, and the states of layers that do not attend."""

    def recurrent(self, layer: int) -> RecurrentState:
        """Return the state of a layer."""


class Mixer(Protocol):
    """The part of a layer in which a token sees others."""

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """Return what it keeps: K and V of each token, or a latent, or a recurrent state."""

    def __call__(
        self, x: Tensor, angles: Angles | None, attention: LayerStates, adapters: LayerAdapters | None
    ) -> Tensor:
        """Return [T, hidden] of normed x [T, hidden]; `angles` are None in a layer without positions."""

    def describe(self) -> PartArgs | None:
        """Describe the loaded part to the native library; return None if that cannot compute it."""


class Attending(Mixer, Protocol):
    """A mixer that keeps keys and values of each token."""

    def attend(
        self, x: Tensor, angles: Angles | None, attention: LayerStates, adapters: LayerAdapters | None
    ) -> object:
        """Store the keys and values of x, and attend; the first half of a call."""


class FeedForward(Protocol):
    """The part of a layer that computes each token alone."""

    @property
    def is_capturable(self) -> bool:
        """Return whether a CUDA graph can hold the loaded part."""

    def __call__(self, x: Tensor, adapters: LayerAdapters | None) -> Tensor:
        """Return [T, hidden] of normed x [T, hidden]."""

    def describe(self) -> PartArgs | None:
        """Describe the loaded part to the native library; return None if that cannot compute it."""


class Load(NamedTuple):
    """A part of a model that is loaded at one time."""

    shapes: Mapping[str, tuple[int, ...]]  # of the tensors that it needs, by their names
    take: Callable[[Mapping[str, StoredTensor]], object]
    share: float = 1.0  # of its bytes that it reads; ranks read their slices


class Maker(NamedTuple):
    """The device, type and scheme of new weights, and the type of states; shared by a model's parts."""

    dtype: torch.dtype
    device: torch.device
    scheme: Scheme
    loads: list[Load]
    targets: dict[str, Target]  # the matrices that adapters can change, by checkpoint name
    prefix: str = ""  # of checkpoint names
    layer: int = 0
    first_place: int = 0  # of a mixer's AdaptedMatrix
    shards: Shards | None = None  # of this rank; None: the model is whole
    plan: Plan = MappingProxyType({})  # how ranks divide the modules under the prefix
    state_dtype: torch.dtype = torch.float32  # of recurrent states
    lacking: list[str] | None = (
        None  # for mixtures that the native library cannot compute: a matrix that it cannot multiply
    )

    @property
    def group(self) -> Group:
        """Return the ranks that hold the model."""
        return SINGLE if self.shards is None else self.shards.group

    def within(self, name: str, layer: int | None = None, plan: Plan = MappingProxyType({})) -> Maker:
        """Return a maker of the parts of a module, in a layer."""
        layer = self.layer if layer is None else layer
        return self._replace(prefix=f"{self.prefix}{name}.", layer=layer, plan=plan)

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return an empty tensor into which a checkpoint's is copied."""
        tensor, key = torch.empty(shape, dtype=dtype or self.dtype, device=self.device), self.prefix + name
        if self.shards is None:
            self.loads.append(Load({key: shape}, lambda stored: stored[key].copy_to(tensor)))
        else:
            parts = [span.rows for span in self.shards.spans(self._division(key.removesuffix(".weight")), shape[0])]
            whole = shape if parts[0] is None else (parts[0].total, *shape[1:])
            pieces = tensor.split([len(tensor) if rows is None else rows.num for rows in parts])

            def take(stored: Mapping[str, StoredTensor]) -> None:
                for rows, piece in zip(parts, pieces, strict=True):
                    cut(stored[key], rows).copy_to(piece)

            self.loads.append(Load({key: whole}, take))
        return tensor

    def linear(
        self,
        rows: Mapping[str, int],
        num_inputs: int,
        *,
        bias: bool = False,
        activation: Activation | None = None,
        place: AdaptedMatrix | None = None,
        is_head: bool = False,
        tied: Embedding | None = None,
    ) -> Linear:
        """Return a linear, to be loaded, of modules merged row by row: their names, and rows.

        Adapters can change it if it has a place. `tied` is an embedding with the same matrix, which is loaded here.
        """
        empty = replace(self._empty(rows, num_inputs), activation=activation, is_head=is_head)
        shape, parts = empty.shape, empty.bundles
        if place is not None and self.shards is None:
            for part in parts:
                at = AdaptedMatrix(place + self.first_place)
                self.targets[part.name] = Target(self.layer, at, part.first_row, part.num_rows, shape, activation)
        linear = Linear(_not_loaded, activation)

        def take(stored: Mapping[str, StoredTensor]) -> None:
            matrix = replace(self._filled(empty, stored), bias=self._bias(parts, stored) if bias else None)
            linear.product = self.scheme.product(matrix)
            if tied is not None:
                shared = linear.weight
                tied.weight = self.scheme.dense(matrix) if shared is None else shared

        wanted = self._shapes(empty)
        if bias:
            wanted |= {f"{part.name}.bias": (_whole(part, num_inputs)[0],) for part in parts}
        self.loads.append(Load(wanted, take, _share(empty)))
        return linear

    def matrix(self, name: str, num_rows: int, num_inputs: int, take: Callable[[Matrix], object]) -> None:
        """Hand a matrix [num_rows, num_inputs] to `take`, which makes its products, once its tensors are there."""
        empty = self._empty({name: num_rows}, num_inputs)
        self.loads.append(Load(self._shapes(empty), lambda stored: take(self._filled(empty, stored)), _share(empty)))

    def embedding(self, name: str, num_rows: int, num_inputs: int, embedding: Embedding) -> None:
        """Load an embedding [num_rows, num_inputs]."""

        def take(matrix: Matrix) -> None:
            embedding.weight = self.scheme.embedding(matrix)

        self.matrix(name, num_rows, num_inputs, take)

    def table(self, name: str, num_rows: int, num_inputs: int, embedding: Embedding) -> None:
        """Load an embedding of which few rows are read; on a CPU rows of floats stay in the file, in its type."""

        def take(matrix: Matrix) -> None:
            rows = stored_rows(matrix)
            found = None if rows is None else floats_of(rows[0])
            embedding.weight = self.scheme.embedding(matrix) if found is None else found

        self.matrix(name, num_rows, num_inputs, take)

    def _division(self, module: str) -> Division:
        return self.plan.get(module.removeprefix(self.prefix), REPLICATED)

    def _empty(self, rows: Mapping[str, int], num_inputs: int) -> Matrix:
        """Return a matrix of modules merged row by row, without its tensors."""
        return Matrix(
            bundles=self._parts(rows, num_inputs),
            shape=(sum(rows.values()), num_inputs),
            dtype=self.dtype,
            device=self.device,
        )

    def _parts(self, rows: Mapping[str, int], num_inputs: int) -> list[Bundle]:
        """Return the parts of a merged matrix, without tensors."""
        parts, first = [], 0
        for name, num_rows in rows.items():
            module = self.prefix + name
            division = self._division(module)
            for span in [Span()] if self.shards is None else self.shards.spans(division, num_rows, num_inputs):
                parts.append(Bundle(module, first, num_rows if span.rows is None else span.rows.num, {}, span))
                first += parts[-1].num_rows
        return parts

    def _shapes(self, matrix: Matrix) -> dict[str, tuple[int, ...]]:
        """Return the tensors that store a matrix."""
        return {
            part.name + end: size
            for part in matrix.bundles
            for end, size in self.scheme.shapes(part.name, *_whole(part, matrix.shape[1])).items()
        }

    def _filled(self, matrix: Matrix, stored: Mapping[str, StoredTensor]) -> Matrix:
        """Return a matrix with its stored tensors."""
        bundles = []
        for part in matrix.bundles:
            endings = self.scheme.shapes(part.name, part.num_rows, matrix.shape[1])
            tensors = {end: stored[part.name + end] for end in endings}
            if self.shards is not None:
                tensors = self.shards.slices(part.name, self._division(part.name), part.span, tensors)
            bundles.append(part._replace(tensors=tensors))
        return replace(matrix, bundles=bundles)

    def _bias(self, parts: Sequence[Bundle], stored: Mapping[str, StoredTensor]) -> Tensor | None:
        """Return the bias; None if another rank adds it."""
        if self.shards is not None and self.group.rank and self._division(parts[0].name).style == "rowwise":
            return None  # the ranks' products are summed
        bias = torch.empty(sum(part.num_rows for part in parts), dtype=self.dtype, device=self.device)
        for part in parts:
            cut(stored[f"{part.name}.bias"], part.span.rows).copy_to(bias.narrow(0, part.first_row, part.num_rows))
        return bias


def _whole(part: Bundle, num_inputs: int) -> tuple[int, int]:
    """Return the rows and inputs of a part's module, of which the rank may have some."""
    rows, inputs = part.span
    return part.num_rows if rows is None else rows.total, num_inputs if inputs is None else inputs.total


def _share(matrix: Matrix) -> float:
    """Return how much of the modules of a matrix it has."""
    wholes = {part.name: math.prod(_whole(part, matrix.shape[1])) for part in matrix.bundles}
    return math.prod(matrix.shape) / sum(wholes.values())


def _not_loaded(_: Tensor) -> Tensor:
    raise AssertionError("a matrix is loaded before it multiplies")
