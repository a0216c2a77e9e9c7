"""Groups of ranks on CPUs: through the native library's shared memory, or through sockets. `open_group` chooses."""

from __future__ import annotations

import mmap
import os
from ctypes import addressof, c_char
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.core.errors import ConfigError
from engine.runtime.native.library import GroupArgs, Library, native
from engine.runtime.parallel.group import SINGLE, Group, guarded, place
from engine.system.host_limits import processor_share

_SPINS = 10_000  # looks at another rank, a few hundred us, before a rank yields its core


def open_group(folder: Path, rank: int, size: int, device: torch.device, *, timeout_s: float) -> Group:
    """Open the group with all other ranks, which call this too, with the same empty private folder."""
    if size == 1:
        return SINGLE
    if device.type == "cuda":
        from engine.runtime.parallel.nccl import NcclGroup

        return NcclGroup(folder, rank, size, device, timeout_s=timeout_s)
    library = native()
    if library is None:
        return GlooGroup(folder, rank, size, timeout_s=timeout_s)
    return SharedMemoryGroup(library, folder, rank, size, timeout_s=timeout_s)


class SharedMemoryGroup(Group):
    """Ranks on the CPUs of one machine, which exchange numbers through the native library; `folder` is in memory."""

    def __init__(self, library: Library, folder: Path, rank: int, size: int, *, timeout_s: float) -> None:
        self.rank, self.size, self._library = rank, size, library
        path, num_bytes = folder / "sums", library.group_bytes(size)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:  # every rank does this, for the first finds no file; a write to a full folder would be a SIGBUS
            os.posix_fallocate(file, 0, num_bytes)
            self._memory = mmap.mmap(file, num_bytes)
        except OSError as error:
            raise ConfigError(
                f"--tensor-parallel-size {size} needs {num_bytes >> 10} KiB in {folder.parent}: {error.strerror}; make room "
                "there, in a container with --shm-size."
            ) from None
        finally:
            os.close(file)
        is_crowded = size * library.num_threads > processor_share()
        self._view = (c_char * num_bytes).from_buffer(self._memory)
        self._args = GroupArgs(addressof(self._view), int(timeout_s * 1000), rank, size, 0 if is_crowded else _SPINS)
        self.address = addressof(self._args)
        self.all_reduce(torch.empty(0))  # all ranks have the memory
        path.unlink(missing_ok=True)

    def all_reduce(self, x: Tensor) -> None:
        assert x.is_contiguous()
        wide = x.float()  # x itself, if that is float32
        self._library.group_sum(self._args, wide.data_ptr(), wide.numel())
        if wide is not x:
            x.copy_(wide)

    def gather(self, x: Tensor, out: Tensor | None) -> None:
        assert x.is_contiguous()
        assert out is None or (out.is_contiguous() and out.dtype == x.dtype)
        at, width = (None, 0) if out is None else (out.data_ptr(), out.shape[1] * out.itemsize)
        self._library.group_gather(self._args, x.data_ptr(), at, len(x), x.shape[1] * x.itemsize, width)

    def broadcast(self, x: Tensor) -> None:
        assert x.is_contiguous()
        self._library.group_broadcast(self._args, x.data_ptr(), x.nbytes)

    def abort(self) -> None:
        self._library.group_abort(self._args)

    close = abort  # the memory goes with this object


class GlooGroup(Group):
    """Ranks that exchange tensors through torch.distributed's gloo: sockets, on any CPU."""

    def __init__(self, folder: Path, rank: int, size: int, *, timeout_s: float) -> None:
        import torch.distributed as dist  # takes time to import, and most models need no group

        self.rank, self.size, self._options = rank, size, dist
        limit = timedelta(seconds=timeout_s)
        store = dist.FileStore(str(folder / "gloo"), size)  # type: ignore[attr-defined] # torch has it
        self._ranks: Any = guarded(lambda: dist.ProcessGroupGloo(store, rank, size, limit))
        self.all_reduce(torch.zeros(1))  # all ranks have read the folder, which the first one removes

    def all_reduce(self, x: Tensor) -> None:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        guarded(lambda: self._ranks.allgather([parts], [x]).wait())
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        x.copy_(total)

    def gather(self, x: Tensor, out: Tensor | None) -> None:
        parts = [
            torch.empty_like(x, memory_format=torch.contiguous_format)
            for _ in range(self.size if out is not None else 0)
        ]
        options = self._options.GatherOptions()
        options.rootRank = 0
        guarded(lambda: self._ranks.gather([parts] if parts else [], [x.contiguous()], options).wait())
        place(parts, out)

    def broadcast(self, x: Tensor) -> None:
        options = self._options.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        guarded(lambda: self._ranks.broadcast([x], options).wait())

    def abort(self) -> None:
        """Close the connections."""
        self._ranks.abort()

    close = abort
