"""Allocates main memory on huge pages, for weights and K/V pools.

With pages of 4 KiB, address translation slows reading of weights (a decode step of SmolLM2 in bfloat16 on two cores:
9.0 ms, with huge pages 8.6), and each new page of the K/V pool costs a fault. Any thread: pools are made at start, an
adapter's memory by its loader, and `populate` runs on the engine thread.
"""

from __future__ import annotations

import ctypes
import math
import mmap

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; pages that exist already are unchanged


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros of `shape` at the start of a page; memory is used as it is written to.

    Raises MemoryError if the system cannot reserve it.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype)
    try:
        memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"{num_bytes} bytes") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE  # only whole pages can be huge
    return whole[start : start + num_bytes].view(dtype).view(shape)


def populate(memory: Tensor) -> bool:
    """Back unwritten memory with zeroed pages; return False where the system cannot."""
    try:
        madvise = ctypes.CDLL(None).madvise  # through ctypes, because mmap's method holds the GIL
    except (AttributeError, OSError, TypeError):  # not Linux
        return False
    begin = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = memory.data_ptr() + memory.nbytes - begin
    return bool(madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _MADV_POPULATE_WRITE) == 0)


def of_memory(pages: mmap.mmap) -> Tensor:
    """Return the bytes of mapped memory, from the first huge page on."""
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _HUGE_PAGE :]
