"""The activation functions that models name. No torch: config.json is read without it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Activation(Enum):
    """The activation function of an MLP's gate; RELU2 is that of an MLP without gates."""

    SILU = auto()
    GELU_TANH = auto()
    GELU = auto()
    RELU2 = auto()  # max(x, 0)^2

    @property
    def is_gated(self) -> bool:
        """Return whether it makes factors of the ups."""
        return self is not Activation.RELU2


@dataclass(frozen=True, slots=True)
class Clamp:
    """gpt-oss's activation: (u + 1) * g * sigmoid(alpha * g), g <= limit, -limit <= u <= limit."""

    alpha: float
    limit: float
