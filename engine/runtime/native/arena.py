"""Allocates packed weights in large chunks on huge pages, to be read as one stream.

Matrices are adjacent in the order they are packed, which is the order in which a step reads them. A chunk lives as long
as any tensor in it. Start-up thread; an adapter that is loaded later has a separate arena, used by its loader's thread.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from contextlib import suppress
from ctypes import POINTER, addressof, c_char, c_int32, c_int64, c_void_p
from threading import Thread

import torch
from torch import Tensor

from engine.runtime import huge_pages
from engine.runtime.native.build import find_library, must_compile

_CHUNK = 32 << 20  # bytes
_LINE = 64  # alignment of tensors


class Arena:
    """Hands out tensors, whose memory is freed with the last reference."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._backed: BackedMemory | None = None  # the memory of the chunk, if it came from outside

    def use(self, memory: BackedMemory) -> None:
        """Take the next tensors from `memory`, until it is full or released."""
        self.release()
        self._chunk, self._used, self._backed = huge_pages.of_memory(memory.pages), 0, memory

    def release(self) -> None:
        """Give back what is left of the memory of `use`."""
        if self._backed is not None:
            self._backed.release(len(self._backed.pages) - len(self._chunk) + self._used)
            self._chunk, self._used, self._backed = self._chunk[:0], 0, None

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of `shape`; fresh memory is zero, and none is used twice."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._used + num_bytes > len(self._chunk):
            self.release()
            self._chunk, self._used = huge_pages.zeros((max(num_bytes, _CHUNK),), torch.uint8), 0
        part = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _LINE) * _LINE
        return part.view(dtype).view(shape)


class BackedMemory:
    """Zeroed memory on huge pages, which a thread backs with pages from its beginning on.

    Backing a gigabyte takes 0.1 s, and 1 to 2.5 s on a virtual machine whose host takes free memory back. What is written
    to it meanwhile stays.
    """

    def __init__(self, num_bytes: int) -> None:
        """Raises OSError, OverflowError or ValueError if the system cannot reserve so much."""
        self.pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
            self.pages.madvise(mmap.MADV_HUGEPAGE)
        self._must_stop = c_int32(0)
        self._thread = Thread(target=self._back, name="backed-memory", daemon=True)
        self._thread.start()

    def release(self, first: int) -> None:
        """Stop backing, and give back the pages from byte `first` on, which nothing uses."""
        self._must_stop.value = 1
        self._thread.join()
        first += -first % mmap.PAGESIZE
        if first < len(self.pages) and hasattr(mmap, "MADV_DONTNEED"):
            self.pages.madvise(mmap.MADV_DONTNEED, first)

    def _back(self) -> None:
        """Touch the pages in C; MADV_POPULATE_WRITE would hold up the memory maps of other threads."""
        path = None if must_compile() else find_library()
        if path is not None:
            with suppress(OSError, AttributeError):  # of a library that is of no use here
                touch = ctypes.CDLL(str(path)).quire_touch
                touch.argtypes, touch.restype = [c_void_p, c_int64, POINTER(c_int32)], None
                touch(addressof(c_char.from_buffer(self.pages)), len(self.pages), self._must_stop)
