"""Memory for packed weights: large chunks on huge pages, which the machine then reads as one stream.

Matrices lie one behind the other in the order they are packed, which is the order a step reads them in. A chunk lives as
long as a tensor in it. Start-up thread; an adapter that is loaded later has an arena of its own, and its loader's thread.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.runtime import huge_pages

_CHUNK = 32 << 20  # bytes
_LINE = 64  # what a tensor's start is a multiple of


class Arena:
    """Hands out tensors; nothing is given back but by letting go of them."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor of `shape`: fresh memory of the system is zero, and none is used twice."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._used + num_bytes > len(self._chunk):
            self._chunk, self._used = huge_pages.zeros((max(num_bytes, _CHUNK),), torch.uint8), 0
        part = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _LINE) * _LINE
        return part.view(dtype).view(shape)
