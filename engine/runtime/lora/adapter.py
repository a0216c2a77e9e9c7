"""An adapter in memory: two thin matrices for each matrix that it changes, and its rows.

Made by loader.py on the loading thread, read by the engine thread. Immutable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import Array, addressof, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from engine.core.rows import SequenceSlice
from engine.core.types import Adapter
from engine.runtime.layers.adapters import AdaptedMatrix
from engine.runtime.native.library import AdaptersArgs, LowRankArgs
from engine.runtime.schemes.linear import Addend, Linear
from engine.runtime.transfer import to_device


class LowRank(NamedTuple):
    """A term of a product x W^T: (x down^T) up^T; `up` includes the adapter's scale."""

    down: Linear  # [rank, inputs]
    up: Linear  # [outputs, rank], an Addend's


class LoraAdapter:
    """The matrices of an adapter, and what requests name it by."""

    __slots__ = ("__weakref__", "digest", "layers", "name", "native")

    def __init__(self, name: str, digest: bytes, layers: Sequence[Sequence[LowRank | None]]) -> None:
        """`layers` has an entry for each layer, with an entry for each AdaptedMatrix."""
        self.name, self.digest, self.layers = name, digest, layers
        self.native = _describe(layers)


class AdapterRows(NamedTuple):
    """The rows of a step that use one adapter."""

    adapter: LoraAdapter
    rows: Tensor  # [R] int64, on the model's device


def group_rows(
    slices: Sequence[SequenceSlice], device: torch.device, find: Callable[[Adapter], LoraAdapter]
) -> list[AdapterRows]:
    """Group the step's tokens by adapter; tokens without one are in no group."""
    found: dict[Adapter, list[int]] = {}
    end = 0
    for piece in slices:
        begin, end = end, end + piece.num_tokens
        adapter = piece.params.adapter
        if adapter is not None:
            found.setdefault(adapter, []).extend(range(begin, end))
    return [AdapterRows(find(adapter), to_device(rows, torch.int64, device)) for adapter, rows in found.items()]


def addends(groups: Sequence[AdapterRows], layer: int, place: AdaptedMatrix, x: Tensor) -> list[Addend]:
    """Return the adapters' terms of the product of x [T, inputs] with one matrix."""
    return [
        Addend(group.rows, _low(low_rank, x.index_select(0, group.rows)), low_rank.up)
        for group in groups
        if (low_rank := group.adapter.layers[layer][place]) is not None
    ]


def _low(low_rank: LowRank, x: Tensor) -> Tensor:
    """Return x down^T, unrounded if the native library continues with it."""
    return low_rank.down.in_float32(x) if low_rank.down.args is not None else low_rank.down(x)


class NativeAdapters:
    """A step's groups for the native library; `args` is valid while this lives."""

    __slots__ = ("_layers", "_of_rows", "args")

    def __init__(self, groups: Sequence[AdapterRows], num_rows: int) -> None:
        self._of_rows = torch.full((num_rows,), -1, dtype=torch.int32)
        self._layers = (c_void_p * len(groups))()
        for index, (adapter, rows) in enumerate(groups):
            assert adapter.native is not None
            self._of_rows[rows] = index
            self._layers[index] = addressof(adapter.native)
        num_layers = min((len(adapter.layers) for adapter, _ in groups), default=0)  # all have the model's last
        self.args = AdaptersArgs(addressof(self._layers), self._of_rows.data_ptr(), len(groups), num_layers)


def _describe(layers: Sequence[Sequence[LowRank | None]]) -> Array[LowRankArgs] | None:
    """Describe the adapter to the native library; None if that lacks a matrix."""
    described = (LowRankArgs * (len(layers) * len(AdaptedMatrix)))()
    for at, low_rank in enumerate(low_rank for places in layers for low_rank in places):
        if low_rank is not None:
            down, up = low_rank.down.args, low_rank.up.args
            if down is None or up is None:
                return None
            described[at] = LowRankArgs(down, up)
    return described
