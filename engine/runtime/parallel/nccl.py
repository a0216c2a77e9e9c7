"""Collectives of GPUs, through torch.distributed's NCCL. A CUDA graph can hold all of them.

Not yet run: no machine with two GPUs was at hand, and the tests hold the calls against a fake.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.runtime.parallel.group import Group, guarded, place


class NcclGroup(Group):
    """Ranks with a GPU each; one such group a process."""

    def __init__(self, folder: Path, rank: int, size: int, device: torch.device, *, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # otherwise a lost rank aborts this process
        store: Any = dist.FileStore(str(folder / "nccl"), size)  # type: ignore[attr-defined] # torch has it
        limit = timedelta(seconds=timeout_s)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=limit, device_id=device)
        self._world: Any = dist.group.WORLD

    def all_reduce(self, x: Tensor) -> None:
        guarded(lambda: dist.all_reduce(x))

    def gather(self, x: Tensor, out: Tensor | None) -> None:
        parts = None if out is None else [torch.empty_like(x) for _ in range(self.size)]
        guarded(lambda: dist.gather(x, parts, dst=0))
        place(parts or (), out)

    def broadcast(self, x: Tensor) -> None:
        guarded(lambda: dist.broadcast(x, src=0))

    def abort(self) -> None:
        self._world.abort()

    def close(self) -> None:
        dist.destroy_process_group()
