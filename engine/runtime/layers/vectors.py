"""Vectors that stand in a step in the place of embeddings, as of images."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Vectors(NamedTuple):
    """Rows of a step whose embeddings are given; no multiplier of embeddings applies to them."""

    rows: Tensor  # [V] int64
    values: Tensor  # [1 + D, V, hidden]: the embeddings, then what is added behind each of the first D layers
