"""The activation functions that models name. No torch: config.json is read without it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Activation(Enum):
    """The activation function of an MLP's gate."""

    SILU = auto()
    GELU_TANH = auto()
    GELU = auto()


@dataclass(frozen=True, slots=True)
class Clamp:
    """gpt-oss's activation: (u + 1) * g * sigmoid(alpha * g), g <= limit, -limit <= u <= limit."""

    alpha: float
    limit: float
