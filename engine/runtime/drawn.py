"""The result of a draw, of any implementation."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Drawn(NamedTuple):
    """A token for each of R rows."""

    ids: Tensor  # [R] int64
    is_finite: Tensor  # [R] bool; False if the logits are not finite, which makes the id void
