"""Computes what is made of a pooled prompt: a vector of length one, or scores. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from engine.core.errors import InvalidRequestError


def unit_vector(values: Sequence[float], dimensions: int | None = None, *, normalizes: bool = True) -> array[float]:
    """Return the first `dimensions` of a vector, or all, scaled to length one if wanted, in float32; zero stays zero.

    Raises InvalidRequestError for dimensions that the vector does not have.
    """
    if dimensions is not None and not 1 <= dimensions <= len(values):
        remedy = "lower it" if dimensions > 0 else "give 1 at least"
        message = f"dimensions is {dimensions}, but this model's vectors have {len(values)}; {remedy}."
        raise InvalidRequestError(message, param="dimensions")
    values = values[:dimensions]
    length = (math.hypot(*values) if normalizes else 0.0) or 1.0
    return array("f", [value / length for value in values])


def activated(values: Sequence[float], activation: str) -> list[float]:
    """Return scores as probabilities: of each label alone by sigmoid, of one among all by softmax, or as they are."""
    if activation == "sigmoid":
        return [0.5 * (1 + math.tanh(value / 2)) for value in values]
    if activation == "softmax":
        weights = [math.exp(value - max(values)) for value in values]
        return [weight / math.fsum(weights) for weight in weights]
    return list(values)
