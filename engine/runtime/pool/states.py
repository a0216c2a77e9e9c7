"""Recurrent states in a pool of blocks: where each layer's pieces are in a slot, and the states of a step.

A slot is some blocks, anywhere in the pool. A piece is contiguous in one of them. Owned by the pool, engine thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.errors import ConfigError
from engine.runtime.kv_layout import RecurrentSpec, StateSpec, StepStates
from engine.runtime.layers.parts import Slice
from engine.runtime.native.decoder import PagedState
from engine.runtime.native.library import StepStatesArgs

_LINE = 64  # bytes to which pieces are aligned in a block


class StatePlaces(NamedTuple):
    """The blocks of a slot, and by layer the (block of the slot, first byte) of each piece."""

    num_blocks: int
    of_layer: Mapping[int, NDArray[np.int32]]


def place_states(specs: Sequence[StateSpec], block_bytes: int) -> StatePlaces:
    """Place the pieces of all recurrent layers in as many blocks as they need, the largest first.

    Raises ConfigError for blocks that are smaller than a piece.
    """
    sizes = {
        index: np.repeat([kind.num_bytes for kind in spec.pieces], [kind.num for kind in spec.pieces])
        for index, spec in enumerate(specs)
        if isinstance(spec, RecurrentSpec)
    }
    of_layer = {index: np.empty((len(each), 2), np.int32) for index, each in sizes.items()}
    largest = max((int(each.max()) for each in sizes.values()), default=0)
    if largest > block_bytes:
        raise ConfigError(
            f"A block has {block_bytes} bytes, and the recurrent state of a layer is divided into parts of {largest}; set "
            f"--block-size to at least {-(-largest // max(block_bytes, 1))} times what it is."
        )
    order = [(-size, layer, piece) for layer, each in sizes.items() for piece, size in enumerate(each.tolist())]
    num_blocks, used = 0, block_bytes
    for size, layer, piece in sorted(order):
        if used - size > block_bytes:
            num_blocks, used = num_blocks + 1, 0
        of_layer[layer][piece] = num_blocks - 1, used
        used = -(-(used - size) // _LINE) * _LINE
    return StatePlaces(num_blocks, of_layer)


class StatePool:
    """The states of all recurrent layers, in a pool's memory."""

    def __init__(self, specs: Sequence[StateSpec], pool: Tensor, max_rows: int, max_drafts: int) -> None:
        """`pool` [num_blocks, bytes of a block] uint8; of each runner row so many drafts' inputs are kept."""
        self.pool, self.max_drafts = pool, max_drafts
        self.places = place_states(specs, pool.shape[1])
        self.step: StepStates
        self._args = StepStatesArgs(base=pool.data_ptr(), block_bytes=pool.shape[1], max_drafts=max_drafts)
        self.of_layer = {
            index: LayerState(self, spec, self.places.of_layer[index], max_rows)
            for index, spec in enumerate(specs)
            if isinstance(spec, RecurrentSpec)
        }

    def prepare(self, step: StepStates) -> None:
        """Take the slots of a step."""
        self.step = StepStates(*map(np.ascontiguousarray, step))  # as the native library reads them
        self._args.num_slices, self._args.width = step.read.shape
        for name, values in self.step._asdict().items():
            setattr(self._args, name, values.ctypes.data)

    def paged(self, layer: int) -> PagedState:
        """Return a layer's state for the native library."""
        state = self.of_layer[layer]
        return PagedState(self._args, state.places, state.kept)


class LayerState:
    """One layer's state in the step's slots, see parts.py."""

    def __init__(self, pool: StatePool, spec: RecurrentSpec, places: NDArray[np.int32], max_rows: int) -> None:
        self._pool, self._spec, self.places = pool, spec, np.ascontiguousarray(places)
        shape = (max_rows, pool.max_drafts, spec.row)
        self.kept = torch.zeros(shape, dtype=spec.dtype, device=pool.pool.device)  # inputs of drafts

    @property
    def slices(self) -> list[Slice]:
        """Return the step's slices."""
        step = self._pool.step
        drafts = np.diff(step.starts) - step.kept
        columns = (step.starts[:-1], step.starts[1:], drafts, step.replays)
        return [Slice(*each) for each in zip(*(column.tolist() for column in columns), strict=True)]

    def read(self, index: int) -> list[Tensor]:
        """Return copies of what a slice reads."""
        slot = self._pool.step.read[index]
        return [
            self._pool.pool.new_zeros((kind.num, *kind.shape), dtype=kind.dtype)
            if slot[0] < 0
            else self._pool.pool[at].view(kind.dtype).unflatten(1, kind.shape)
            for kind, at in zip(self._spec.pieces, self._bytes(slot), strict=True)
        ]

    def write(self, index: int, pieces: Sequence[Tensor], *, brings_up: bool = False) -> None:
        """Write what a slice leaves; with `brings_up` where it has read."""
        slot = (self._pool.step.read if brings_up else self._pool.step.written)[index]
        for values, at in zip(pieces, self._bytes(slot), strict=True):
            self._pool.pool[at] = values.flatten(1).contiguous().view(torch.uint8)

    def drafts(self, index: int) -> Tensor:
        """Return the memory of a slice's drafts."""
        return self.kept[int(self._pool.step.rows[index])]

    def _bytes(self, slot: NDArray[np.int32]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the indices of each kind of pieces in the pool: blocks [pieces, 1] and bytes [pieces, of a piece]."""
        first, device = 0, self._pool.pool.device
        for kind in self._spec.pieces:
            parts, offsets = torch.from_numpy(self.places[first : first + kind.num]).long().unbind(1)
            blocks = torch.from_numpy(slot).long()[parts]
            yield blocks[:, None].to(device), (offsets[:, None] + torch.arange(kind.num_bytes)).to(device)
            first += kind.num
