"""The matrices of a layer that adapters can change, and their products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

from engine.runtime.activation import Activation
from engine.runtime.schemes.linear import Addend, Linear


class AdaptedMatrix(IntEnum):
    """The matrices of a layer, as in lora.h."""

    QKV = 0
    O = 1  # noqa: E741 - its name in every checkpoint
    GATE_UP = 2
    DOWN = 3
    Q_B = 4  # of a latent of queries, or the gates of Gated DeltaNet


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


def adapted(linear: Linear, place: AdaptedMatrix, x: Tensor, adapters: LayerAdapters | None) -> Tensor:
    """Return the product of x with the matrix at a place, with the terms of adapters."""
    return linear(x) if adapters is None else linear(x, adapters(place, x))
