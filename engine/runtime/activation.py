"""The activation functions that models name. No torch: config.json is read without it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar


class Activation(Enum):
    """The activation function of an MLP's gate; RELU2 and the last two are those of an MLP without gates. Values are those of quire_cpu.h."""

    SILU = 1
    GELU_TANH = 2
    GELU = 3
    RELU2 = 4  # max(x, 0)^2
    GELU_ALONE = 5
    GELU_TANH_ALONE = 6

    @property
    def is_gated(self) -> bool:
        """Return whether it makes factors of the ups."""
        return self.value < Activation.RELU2.value


def code_of(activation: Activation | None) -> int:
    """Return the native library's number of an activation, or of none."""
    return 0 if activation is None else activation.value


@dataclass(frozen=True, slots=True)
class Clamp:
    """gpt-oss's activation: (u + 1) * g * sigmoid(alpha * g), g <= limit, -limit <= u <= limit."""

    alpha: float
    limit: float
    is_gated: ClassVar[bool] = True
