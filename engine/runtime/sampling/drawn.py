"""What a draw gives, whoever makes it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Drawn(NamedTuple):
    """A token for each of R rows."""

    ids: Tensor  # [R] int64
    is_finite: Tensor  # [R] bool; False where the logits are not, and the id is void
