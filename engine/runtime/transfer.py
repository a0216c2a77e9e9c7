"""Copies numbers from the host to the device without waiting.

A copy from pageable memory waits for everything queued on the device. Pinned memory that is overwritten during a copy
corrupts it. So every copy of a step goes through this module. Engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32, torch.float64: np.float64}


def to_device(numbers: Sequence[object] | np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the numbers as a tensor on the device; a CPU shares an array's memory."""
    # Through numpy, which reads a list in a tenth of torch's time.
    tensor = torch.from_numpy(np.ascontiguousarray(numbers, dtype=_NUMPY[dtype]))
    if device.type == "cpu":
        return tensor
    # torch does not hand out pinned memory again before the copy is done.
    return tensor.pin_memory().to(device, non_blocking=True)


class Staging:
    """Host memory for repeated copies to the device, one after the other."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        is_pinned = device.type == "cuda"
        self._host = torch.zeros(tuple(shape), dtype=dtype, pin_memory=is_pinned)
        self._array: np.ndarray = self._host.numpy()
        self._device = device
        self._copied = torch.cuda.Event() if is_pinned else None

    def begin(self) -> np.ndarray:
        """Wait for the previous copy to end, and return the memory to write to."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._array

    def send(self, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Return the first entries on the device, as one tensor after the other; a CPU shares the memory."""
        sizes = [*map(prod, shapes)]
        sent = self._host[: sum(sizes)].to(self._device, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return [part.view(shape) for part, shape in zip(sent.split(sizes), shapes, strict=True)]

    def send_to(self, target: Tensor) -> None:
        """Copy all of the memory to `target`, which has the same size."""
        target.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class Drawn(NamedTuple):
    """A token for each of R rows."""

    ids: Tensor  # [R] int64
    is_finite: Tensor  # [R] bool; False if the logits are not finite, which makes the id void
