"""The ranks that hold one model, and their collectives.

Sums are made in the order of the ranks, so that a row has the same bits whatever else is in a batch. Each rank is a
process; its engine thread makes all calls, in the same order as the other ranks. Only `abort` is for other threads, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.runtime.native.functions import GroupError


class Group:
    """The ranks, seen from one of them; this one is alone, and sends nothing.

    Of several ranks, a call that waits too long for another one raises GroupError.
    """

    rank = 0
    size = 1
    address: int | None = None  # of the C group, for the native decoder; None: the model reduces by `all_reduce`

    def all_reduce(self, x: Tensor) -> None:
        """Replace contiguous x by the sum of all ranks' x."""

    def gather(self, x: Tensor, out: Tensor | None) -> None:
        """Write the columns of x [R, n] of all ranks, n being the same on all, to rank 0's out [R, width].

        Columns beyond the width are dropped. The other ranks have no out. One rank's are written where they are wanted.
        """

    def broadcast(self, x: Tensor) -> None:
        """Replace contiguous x by rank 0's."""

    def abort(self) -> None:
        """Let the calls of all ranks fail that wait or follow. Any thread may call it."""

    def close(self) -> None:
        """Release the group's memory or connections."""


SINGLE = Group()


def least(group: Group, number: int, device: torch.device) -> int:
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
