"""Allocates packed weights in large chunks on huge pages, to be read as one stream.

Matrices are adjacent in the order they are packed, which is the order in which steps read them. A chunk lives as long
as any matrix in it. Start-up thread; an adapter that is loaded later has a separate arena, used by its loader's thread.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.runtime import huge_pages
from engine.runtime.native.backed_memory import BackedMemory

_CHUNK = 32 << 20  # bytes
_LINE = 64  # alignment of matrices


class Arena:
    """Hands out memory, which is freed with the last reference."""

    def __init__(self) -> None:
        self._chunk = torch.zeros(0, dtype=torch.uint8)
        self._used = 0
        self._backed: BackedMemory | None = None  # the memory of the chunk, if it came from outside

    def use(self, memory: BackedMemory) -> None:
        """Take the next matrices from `memory`, until it is full or released."""
        self.release()
        self._chunk, self._used, self._backed = huge_pages.of_memory(memory.pages), 0, memory

    def release(self) -> None:
        """Give back what is left of the memory of `use`, and begin another chunk: the next matrices may live longer."""
        if self._backed is not None:
            self._backed.release(len(self._backed.pages) - len(self._chunk) + self._used)
        self._chunk, self._used, self._backed = torch.zeros(0, dtype=torch.uint8), 0, None

    def take(self, num_bytes: int) -> np.ndarray:
        """Return so many bytes; fresh memory is zero, and none is used twice."""
        if self._used + num_bytes > len(self._chunk):
            self.release()
            self._chunk, self._used = huge_pages.zeros((max(num_bytes, _CHUNK),), torch.uint8), 0
        part = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _LINE) * _LINE
        return part.numpy()
