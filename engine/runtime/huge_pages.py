"""Main memory that the system is asked to back with huge pages, for what a step reads all of or all over.

With pages of 4 KiB addresses of weights are looked up at every turn (a decode step of SmolLM2 in bfloat16 on two cores: 9.0
ms, with huge pages 8.6), and new pages of the K/V pool come one fault at a time. Any thread: pools
are made at start, an adapter's memory by its loader, and populate runs on the engine's.
"""

from __future__ import annotations

import ctypes
import math
import mmap

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; what is there already stays as it is


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of `shape` at the start of a page, zero for it is fresh. It takes room as it is written to.

    Raises MemoryError where the system has no such room at all.
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
    """Have the system put zeroed pages under memory that nobody has written to yet; False where it cannot."""
    try:
        madvise = ctypes.CDLL(None).madvise  # through ctypes, for mmap's own keeps the interpreter while it works
    except (AttributeError, OSError, TypeError):  # not a system of this kind
        return False
    begin = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = memory.data_ptr() + memory.nbytes - begin
    return bool(madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _MADV_POPULATE_WRITE) == 0)
