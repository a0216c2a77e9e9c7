"""A packed module of a checkpoint, and the reading of its tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.files.quant_config import Settings
from engine.runtime.weights.checkpoint import StoredTensor
from engine.runtime.weights.headers import Headers, dtype_of
from engine.runtime.weights.stored.packed import e8m0


class Part(NamedTuple):
    """A module: its name, sides and settings, and the headers of all tensors."""

    name: str
    rows: int
    inputs: int
    settings: Settings
    headers: Headers

    def has(self, ending: str) -> bool:
        """Return whether the files hold a tensor of this module."""
        return self.name + ending in self.headers

    def kind(self, ending: str) -> str:
        """Return the stored type of a tensor; "" if it is missing."""
        return self.headers[self.name + ending].kind if self.has(ending) else ""

    def shape(self, ending: str, *allowed: tuple[int, ...]) -> tuple[int, ...]:
        """Return the stored shape if it is an allowed one, else the first of these."""
        found = self.headers[self.name + ending].shape if self.has(ending) else None
        return found if found in allowed else allowed[0]

    @property
    def group(self) -> int:
        """Return the number of inputs that share a scale."""
        return self.settings.group or self.inputs


def read(tensor: StoredTensor) -> Tensor:
    """Return a tensor in its stored type."""
    found = torch.empty(tensor.shape, dtype=dtype_of(tensor.kind))
    tensor.copy_to(found)
    return found


def read_scales(tensor: StoredTensor) -> Tensor:
    """Return scales as float32; those of one byte are powers of two."""
    found = read(tensor)
    if tensor.kind in ("U8", "F8_E8M0"):
        return e8m0(found.view(torch.uint8))
    return found.float()
