"""The activation functions that models name. No torch: config.json is read without it."""

from __future__ import annotations

from enum import Enum, auto


class Activation(Enum):
    """The activation function of an MLP's gate."""

    SILU = auto()
    GELU_TANH = auto()
    GELU = auto()
