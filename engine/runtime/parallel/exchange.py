"""What groups of ranks have in common, whatever carries their numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.runtime.native.library import GroupError


class Exchange(Protocol):
    """The calls of a Group (group.py) that an agreement takes."""

    rank: int
    size: int

    def gather(self, x: Tensor, out: Tensor | None) -> None:
        """Write the columns of all ranks to rank 0's out."""
        ...

    def broadcast(self, x: Tensor) -> None:
        """Replace contiguous x by rank 0's."""
        ...


def least(group: Exchange, number: int, device: torch.device) -> int:
    """Return the least of all ranks' numbers, which all ranks call for: a choice that one rank must not make alone."""
    mine = torch.tensor([[number]], dtype=torch.int64, device=device)
    everyones = mine.new_empty(1, group.size) if group.rank == 0 else None
    group.gather(mine, everyones)
    agreed = mine if everyones is None else everyones.amin(1, keepdim=True)
    group.broadcast(agreed)
    return int(agreed)


def place(parts: Sequence[Tensor], out: Tensor | None) -> None:
    """Write the ranks' columns side by side to `out`, as far as it is wide."""
    if out is not None:
        for columns, part in zip(out.split(parts[0].shape[1], 1), parts, strict=True):
            columns.copy_(part[:, : columns.shape[1]])


def guarded(call: Callable[[], Any]) -> Any:
    """Return a call's result. Raises GroupError where torch.distributed raises RuntimeError."""
    try:
        return call()
    except RuntimeError as error:
        raise GroupError(f"A rank of the model did not take part in a step: {error}") from error
