"""Random weights for a config.json, to benchmark any size without a checkpoint.

Seeded, and scaled to keep activations finite. A few million numbers are drawn once and repeated, because drawing
billions would take a minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from engine.core.errors import MemoryBudgetError
from engine.core.types import Progress
from engine.runtime.host_memory import available_memory
from engine.runtime.weights.checkpoint import Keep, Report, StoredTensor

_GIB = 1 << 30
_SCALE = 0.02  # the usual initialisation
_NUM_DRAWN = (1 << 22) - 3  # odd, so that the rows of a matrix differ


def fill_dummy(
    targets: Mapping[str, Tensor], seed: int, report: Report, keepers: Mapping[str, Keep] | None = None
) -> None:
    """Fill norms with 1, biases with 0, matrices with random numbers or their keepers."""
    keepers = keepers or {}
    total, done = sum(target.nbytes for target in targets.values()), 0
    drawn: Tensor | None = None
    for name, target in targets.items():
        if name.endswith(".bias"):
            target.zero_()
        elif "norm" in name:
            target.fill_(1.0)
        else:
            if drawn is None:
                generator = torch.Generator().manual_seed(seed)
                drawn = (torch.randn(_NUM_DRAWN, generator=generator) * _SCALE).to(target)
            keep = keepers.get(name)
            if keep is None:
                _tile(target, drawn)
            else:
                keep(StoredTensor(name, tuple(target.shape), target.nbytes, name, partial(_tile, drawn=drawn)))
        done += target.nbytes
        report(Progress("weights", name, done, total, "bytes"))


def check_room(num_weights: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise MemoryBudgetError if random weights exceed main memory; a GPU raises by itself."""
    num_bytes, room = num_weights * dtype.itemsize, available_memory()
    if device.type == "cpu" and num_bytes > room:
        raise MemoryBudgetError(
            f"config.json calls for {num_bytes / _GIB:.1f} GiB of weights, and this machine has {room / _GIB:.1f} GiB of memory "
            "left; choose a smaller model or a smaller --dtype."
        )


def _tile(target: Tensor, drawn: Tensor) -> None:
    flat = target.view(-1)
    for start in range(0, flat.numel(), drawn.numel()):
        part = flat[start : start + drawn.numel()]
        part.copy_(drawn[: part.numel()])
