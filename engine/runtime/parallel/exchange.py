"""What the groups of torch.distributed have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from engine.runtime.native.library import GroupError


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
