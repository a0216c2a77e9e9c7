"""Memory for packed weights that a thread backs with pages while modules are imported. Imports no torch."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from ctypes import POINTER, addressof, c_char, c_int32, c_int64, c_void_p
from functools import cache
from threading import Thread

from engine.runtime.native.build import best_library


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
        if (touch := find_touch()) is not None:
            touch(addressof(c_char.from_buffer(self.pages)), len(self.pages), self._must_stop)


@cache
def find_touch() -> Callable[[int, int, c_int32], None] | None:
    """Return the library's function that touches pages, or None without a library.

    The first call holds the GIL while another library is loaded.
    """
    path = best_library()
    if path is None:
        return None
    try:
        touch = ctypes.CDLL(str(path)).quire_touch
    except (OSError, AttributeError):  # a library that is of no use here
        return None
    touch.argtypes, touch.restype = [c_void_p, c_int64, POINTER(c_int32)], None
    return touch
