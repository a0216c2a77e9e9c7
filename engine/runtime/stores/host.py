"""Host memory behind the pool: copies the blocks that a plan names out of the pool, and back.

On a CPU a block is copied when its plan runs; on CUDA beside the steps (pinned.py). engine/core/kv/host_tier.py decides
which blocks. Engine thread.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.core.errors import ConfigError, CopyError, MemoryBudgetError
from engine.core.step import StepPlan
from engine.runtime import huge_pages
from engine.system.host_limits import available_memory

_GIB = 1 << 30
_IN_MEMORY = ("tmpfs", "ramfs")
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT)


def host_rows(pool: Sequence[Tensor], num_blocks: int) -> Tensor:
    """Allocate main memory for blocks, a row each. Raises MemoryBudgetError."""
    size = sum(view[0].numel() for view in pool)
    try:
        return huge_pages.zeros((num_blocks, size), pool[0].dtype)
    except (RuntimeError, MemoryError) as error:
        gib = num_blocks * size * pool[0].itemsize / _GIB
        raise MemoryBudgetError(
            f"--swap-space and host_gib of --kv-offload-config need {gib:.2f} GiB of main memory, which is not free; lower them."
        ) from error


def rows_as_bytes(rows: Tensor) -> list[memoryview]:
    """Return the rows' memory, row by row."""
    return [memoryview(row) for row in rows.view(torch.uint8).numpy()]


def split_rows(rows: Tensor, pool: Sequence[Tensor]) -> list[Tensor]:
    """Return the part of the rows of each view of the pool, in the view's shape."""
    parts = rows.split([view[0].numel() for view in pool], dim=1)
    return [part.unflatten(1, view.shape[1:]) for part, view in zip(parts, pool, strict=True)]


class HostPool:
    """Host blocks; every plan calls `begin`, copies on write, calls `bring_in`.

    These are of a pool in main memory, and in a file, which the system may page to; copies end with their calls.
    """

    def __init__(self, pool: Sequence[Tensor], num_blocks: int, folder: Path | None = None) -> None:
        self._pool = list(pool)
        size = sum(view[0].numel() for view in pool)
        rows = mapped_rows((num_blocks, size), pool[0].dtype, folder)
        self._bytes = rows_as_bytes(rows)
        self._views = split_rows(rows, pool)

    def begin(self, plan: StepPlan) -> None:
        """Copy out `swap_out`, before the pool is written; complete earlier arrivals."""
        self._copy(self._pool, self._views, plan.swap_out)

    def settle(self) -> None:
        """Complete earlier arrivals before anything else is launched, between plans."""

    def bring_in(self, plan: StepPlan) -> None:
        """Copy in the plan's `swap_in`, before any slice that reads it."""
        self._copy(self._views, self._pool, plan.swap_in)

    def row(self, host_block: int) -> memoryview:
        """Return a host block's bytes, for a thread that called `finish_copies`."""
        return self._bytes[host_block]

    def finish_copies(self) -> None:
        """Return when all copies of plans that were launched are done. Any thread."""

    def close(self) -> None:
        """Free the memory."""
        self._pool, self._views, self._bytes = [], [], []

    def _copy(self, sources: list[Tensor], destinations: list[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        try:
            # One by one is 20 times as fast as by index, which torch does number by number (15 GB/s against 0.7, one
            # core).
            for view, other in zip(sources, destinations, strict=True):
                for source, destination in pairs:
                    other[destination].copy_(view[source])
        except (RuntimeError, ValueError) as error:  # of torch; the step can do without
            raise CopyError(f"{type(error).__name__}: {error}") from error


def count_host_blocks(num_gib: float, bytes_per_block: int, room: int | None, flag: str = "--swap-space") -> int:
    """Return the blocks in `num_gib`. Raises ConfigError for none, or for too many.

    `room` is the free main memory, None for blocks in a file.
    """
    num_blocks = int(num_gib * _GIB) // bytes_per_block
    if room is not None and num_blocks * bytes_per_block > room:
        raise ConfigError(
            f"{flag} is {num_gib:g} GiB, and main memory has {room / _GIB:.1f} left; set it to at most "
            f"{room // (_GIB // 10) / 10:g}."
        )
    if num_gib and not num_blocks:
        raise ConfigError(
            f"{flag} is {num_gib:g} GiB, less than one block of K/V ({bytes_per_block / (1 << 20):.2f} MiB); "
            "raise it, or set it to 0."
        )
    return num_blocks


def mapped_rows(shape: tuple[int, int], dtype: torch.dtype, folder: Path | None) -> Tensor:
    """Return memory that the system can page out to an unnamed file in `folder`, or in its temporary folder.

    If the folder is itself in main memory (tmpfs), its free space is the limit. Copying a block of SmolLM2 there takes
    0.02 ms, as in any memory (0.15 ms when its pages are first touched). Raises ConfigError if there is no room.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    where = folder or Path(tempfile.gettempdir())
    try:
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_in_memory(where) and num_bytes > (room := available_memory()):
            raise OSError(errno.ENOMEM, f"it is in main memory, which has {room / _GIB:.2f} GiB left")
        with tempfile.TemporaryFile(dir=where) as file:
            if hasattr(os, "posix_fallocate"):  # otherwise a full disk would kill the process when a page is touched
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            os.ftruncate(file.fileno(), num_bytes)
            memory = mmap.mmap(file.fileno(), num_bytes)
    except OSError as error:
        elsewhere = "name another folder in --kv-offload-config, or by TMPDIR"
        if error.errno not in _NO_ROOM:
            raise ConfigError(f"{where} cannot hold blocks ({error.strerror or error}); {elsewhere}.") from error
        raise ConfigError(
            f"--swap-space and --kv-offload-config need {num_bytes / _GIB:.2f} GiB in {where}, where there is no such room "
            f"({error.strerror or error}); lower them, or {elsewhere}."
        ) from error
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def _is_in_memory(folder: Path) -> bool:
    """Return whether the folder's files occupy main memory; False without /proc."""
    device = folder.stat().st_dev
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    systems = {line.split()[2]: line.rpartition(" - ")[2].split()[0] for line in mounts.splitlines()}
    return systems.get(number) in _IN_MEMORY
