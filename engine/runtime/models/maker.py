"""Makes the tensors and matrices of a model, and lists how a checkpoint is loaded into them.

A model is made empty. Its parts name their tensors by the checkpoint's keys, and `loads` has them in the order in which
a step reads them; weights/fill.py loads them in that order. Matrices get their memory only then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from engine.runtime.activation import Activation
from engine.runtime.linear import Linear
from engine.runtime.lora.adapter import Place, Target
from engine.runtime.schemes.base import Bundle, Matrix, Scheme
from engine.runtime.weights.checkpoint import StoredTensor
from engine.runtime.weights.fill import Load


class Maker(NamedTuple):
    """The device, type and scheme of new weights; shared by a model's parts."""

    dtype: torch.dtype
    device: torch.device
    scheme: Scheme
    loads: list[Load]
    targets: dict[str, Target]  # the matrices that adapters can change, by checkpoint name
    prefix: str = ""  # of checkpoint names
    layer: int = 0

    def within(self, name: str, layer: int | None = None) -> Maker:
        """Return a maker of the parts of a module, in a layer."""
        return self._replace(prefix=f"{self.prefix}{name}.", layer=self.layer if layer is None else layer)

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return an empty tensor into which a checkpoint's is copied."""
        tensor, key = torch.empty(shape, dtype=dtype or self.dtype, device=self.device), self.prefix + name
        self.loads.append(Load({key: shape}, lambda stored: stored[key].copy_to(tensor)))
        return tensor

    def embedding(self, name: str, num_rows: int, num_inputs: int) -> Tensor:
        """Return an empty matrix into which a checkpoint's is dequantised."""
        tensor, key = torch.empty(num_rows, num_inputs, dtype=self.dtype, device=self.device), self.prefix + name
        wanted = self.scheme.shapes(key, num_rows, num_inputs)

        def take(stored: Mapping[str, StoredTensor]) -> None:
            self.scheme.dequantise(Bundle(key, 0, num_rows, {end: stored[key + end] for end in wanted}), tensor)

        self.loads.append(Load({key + end: shape for end, shape in wanted.items()}, take))
        return tensor

    def linear(
        self,
        rows: Mapping[str, int],
        num_inputs: int,
        *,
        bias: bool = False,
        activation: Activation | None = None,
        place: Place | None = None,
        is_head: bool = False,
        dense: Tensor | None = None,
    ) -> Linear:
        """Return a linear, to be loaded, of modules merged row by row: their names, and rows.

        Adapters can change it if it has a place. `dense` is an embedding that a head is tied to.
        """
        shape, parts = (sum(rows.values()), num_inputs), self._parts(rows)
        if place is not None:
            for part in parts:
                self.targets[part.name] = Target(self.layer, place, part.first_row, part.num_rows, shape, activation)
        linear = Linear(_not_loaded, activation)
        empty = Matrix(
            bundles=parts,
            shape=shape,
            dtype=self.dtype,
            device=self.device,
            bias=None,
            activation=activation,
            is_head=is_head,
            dense=dense,
        )

        def take(stored: Mapping[str, StoredTensor]) -> None:
            matrix = replace(self._filled(empty, stored), bias=self._bias(parts, stored) if bias else None)
            linear.product = self.scheme.product(matrix)

        wanted = self._shapes(empty)
        if bias:
            wanted |= {f"{part.name}.bias": (part.num_rows,) for part in parts}
        self.loads.append(Load(wanted, take))
        return linear

    def matrix(self, name: str, num_rows: int, num_inputs: int, take: Callable[[Matrix], object]) -> None:
        """Hand a matrix [num_rows, num_inputs] to `take`, which makes its products, once its tensors are there."""
        empty = Matrix(
            bundles=self._parts({name: num_rows}),
            shape=(num_rows, num_inputs),
            dtype=self.dtype,
            device=self.device,
            bias=None,
            activation=None,
            is_head=False,
            dense=None,
        )
        self.loads.append(Load(self._shapes(empty), lambda stored: take(self._filled(empty, stored))))

    def _parts(self, rows: Mapping[str, int]) -> list[Bundle]:
        """Return the parts of a merged matrix, without tensors."""
        firsts = accumulate(rows.values(), initial=0)
        return [
            Bundle(self.prefix + name, first, num, {})
            for first, (name, num) in zip(firsts, rows.items(), strict=False)  # the last is the end
        ]

    def _shapes(self, matrix: Matrix) -> dict[str, tuple[int, ...]]:
        """Return the tensors that store a matrix."""
        return {
            part.name + end: size
            for part in matrix.bundles
            for end, size in self.scheme.shapes(part.name, part.num_rows, matrix.shape[1]).items()
        }

    def _filled(self, matrix: Matrix, stored: Mapping[str, StoredTensor]) -> Matrix:
        """Return a matrix with its stored tensors."""
        bundles = []
        for part in matrix.bundles:
            endings = self.scheme.shapes(part.name, part.num_rows, matrix.shape[1])
            bundles.append(part._replace(tensors={end: stored[part.name + end] for end in endings}))
        return replace(matrix, bundles=bundles)

    def _bias(self, parts: Sequence[Bundle], stored: Mapping[str, StoredTensor]) -> Tensor:
        bias = torch.empty(sum(part.num_rows for part in parts), dtype=self.dtype, device=self.device)
        for part in parts:
            stored[f"{part.name}.bias"].copy_to(bias.narrow(0, part.first_row, part.num_rows))
        return bias


def _not_loaded(_: Tensor) -> Tensor:
    raise AssertionError("a matrix is loaded before it multiplies")
