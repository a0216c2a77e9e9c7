"""Memory for packed weights: large chunks that the system is asked to back with huge pages.

A decode step reads every weight once, and with pages of 4 KiB spends a fifth of its time looking addresses up (the
default model on two cores: 8.6 ms a step, with huge pages 6.9). Matrices lie one behind the other in the order they are
packed, which is the order a step reads them in. A chunk lives as long as a tensor in it. Start-up thread.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

_CHUNK = 32 << 20  # bytes
_HUGE_PAGE = 2 << 20
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
            self._chunk, self._used = _new_chunk(max(num_bytes, _CHUNK)), 0
        part = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _LINE) * _LINE
        return part.view(dtype).view(shape)


def _new_chunk(num_bytes: int) -> Tensor:
    """Aligned to huge pages, for only whole ones can be."""
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + num_bytes]
