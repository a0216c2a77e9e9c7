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
    row_order: Tensor | None = None  # the checkpoint's row in each of its rows, if the file has another order
    input_order: Tensor | None = None  # likewise


def adapted(linear: Linear, place: AdaptedMatrix, x: Tensor, adapters: LayerAdapters | None) -> Tensor:
    """Return the product of x with the matrix at a place, with the terms of adapters."""
    return linear(x) if adapters is None else linear(x, adapters(place, x))


def beside(adapters: LayerAdapters | None) -> LayerAdapters | None:
    """Return the terms for the second mixer of a layer, which calls its matrices as the first one does."""
    if adapters is None:
        return None
    return lambda place, x: adapters(AdaptedMatrix(place + AdaptedMatrix.BESIDE_QKV), x)
