"""Collectives of GPUs, through torch.distributed's NCCL. A CUDA graph can hold all of them.

Small sums go through symmetric memory, where each GPU reads the others' parts in one kernel and adds them in the order of
the ranks. NCCL chooses its order by the size of a message. Each choice between the two is the same on all ranks, which
would wait for each other otherwise. Not yet run: no machine with two GPUs was at hand, and the tests hold the calls against
a fake.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from engine.runtime.parallel.group import Group, guarded, least, place

ONE_SHOT_BYTES = 1 << 19  # sums of at most so many take one kernel; from published figures, never measured
_ONE_SHOT_DTYPES = (torch.float32, torch.bfloat16)  # that torch's kernel adds; it raises for float16
_log = logging.getLogger(__name__)


class NcclGroup(Group):
    """Ranks with a GPU each; one such group a process."""

    def __init__(self, folder: Path, rank: int, size: int, device: torch.device, *, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # otherwise a lost rank aborts this process
        store: Any = dist.FileStore(str(folder / "nccl"), size)  # type: ignore[attr-defined] # torch has it
        limit = timedelta(seconds=timeout_s)
        store.set_timeout(limit)  # ranks also meet in it for symmetric memory
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=limit, device_id=device)
        self._world: Any = dist.group.WORLD
        self._shared = self._open_shared(device)

    def _open_shared(self, device: torch.device) -> Tensor | None:
        """Return memory that all ranks' GPUs read; None on all ranks if one of them cannot."""
        shared: Tensor | None = self._tried(
            device, lambda: symmetric.empty(ONE_SHOT_BYTES, dtype=torch.uint8, device=device)
        )
        if shared is None or self._tried(device, lambda: symmetric.rendezvous(shared, self._world)) is None:
            return None
        return shared

    def _tried(self, device: torch.device, call: Callable[[], Any]) -> Any:
        """Return a call's result; None on all ranks if it raised on one, for which those that need it wait a while."""
        result, reason = None, "another rank cannot use it"
        try:
            result = call()
        except Exception as error:  # whatever this machine lacks for it
            reason = str(error)
        if least(self, int(result is not None), device):
            return result
        _log.info("sums of all ranks go through NCCL, without symmetric memory: %s", reason)
        return None

    def all_reduce(self, x: Tensor) -> None:
        """Replace contiguous x by the sum of all ranks' x."""
        is_small = x.nbytes <= ONE_SHOT_BYTES and x.nbytes % 16 == 0
        if self._shared is None or not is_small or x.dtype not in _ONE_SHOT_DTYPES:
            guarded(lambda: dist.all_reduce(x))
            return
        part = self._shared[: x.nbytes].view(x.dtype).view(x.shape)
        part.copy_(x)
        _operators().one_shot_all_reduce_out(part, "sum", self._world.group_name, x)

    def gather(self, x: Tensor, out: Tensor | None) -> None:
        """Write the columns of all ranks to rank 0's out."""
        parts = None if out is None else [torch.empty_like(x) for _ in range(self.size)]
        guarded(lambda: dist.gather(x, parts, dst=0))
        place(parts or (), out)

    def broadcast(self, x: Tensor) -> None:
        """Replace contiguous x by rank 0's."""
        guarded(lambda: dist.broadcast(x, src=0))

    def abort(self) -> None:
        """End the calls that wait on this rank's GPU."""
        self._world.abort()

    def close(self) -> None:
        """Close the connections."""
        dist.destroy_process_group()


def _operators() -> Any:
    return torch.ops.symm_mem
