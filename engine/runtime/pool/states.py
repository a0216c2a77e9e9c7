"""The recurrent states in the paged pool. Engine thread.

A slot is some blocks, anywhere in the pool. Each layer's pieces are contiguous in one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.errors import ConfigError
from engine.runtime.attention.backend import Batch
from engine.runtime.kv_layout import CHUNK, LINE, DeviceState, RecurrentSpec, StateSpec, StateTensors, StepStates
from engine.runtime.layers.parts import Slice
from engine.runtime.native.library import StepStatesArgs
from engine.runtime.native.parts import PagedState
from engine.runtime.transfer import to_device

_SHORT = 16  # most rows of a slice that kernels compute token by token: a chunk's products cost as much for a few rows


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
    pieces = [(size, layer, piece) for layer, each in sizes.items() for piece, size in enumerate(each.tolist())]
    num_blocks, used = 0, block_bytes
    for size, layer, piece in sorted(pieces, key=itemgetter(0), reverse=True):  # equal ones stay in order
        if used + size > block_bytes:
            num_blocks, used = num_blocks + 1, 0
        of_layer[layer][piece] = num_blocks - 1, used
        used = -(-(used + size) // LINE) * LINE
    return StatePlaces(num_blocks, of_layer)


class StatePool:
    """The states of all recurrent layers, in a pool's memory."""

    def __init__(self, specs: Sequence[StateSpec], pool: Tensor, max_rows: int, max_drafts: int) -> None:
        """`pool` [num_blocks, bytes of a block] uint8; of each runner row so many drafts' inputs are kept."""
        self.pool, self.max_drafts = pool, max_drafts
        self.places = place_states(specs, pool.shape[1])
        self.step: StepStates
        self._tensors: StateTensors | None = None
        self._contexts: Sequence[int] = ()
        self._args = StepStatesArgs(base=pool.data_ptr(), block_bytes=pool.shape[1], max_drafts=max_drafts)
        self.of_layer = {
            index: LayerState(self, spec, self.places.of_layer[index], max_rows)
            for index, spec in enumerate(specs)
            if isinstance(spec, RecurrentSpec)
        }

    def prepare(self, batch: Batch) -> None:
        """Take the slots of a step, if any; those of a graph are on the device."""
        if batch.state_tensors is not None:
            self._tensors = batch.state_tensors
        if batch.states is None:  # a head's layers have none
            return
        self.step = StepStates(*map(np.ascontiguousarray, batch.states))  # as the native library reads them
        self._tensors, self._contexts = None, batch.context_lens_host
        self._args.num_slices, self._args.width = self.step.read.shape
        for name, values in self.step._asdict().items():
            setattr(self._args, name, values.ctypes.data)

    def tensors(self) -> StateTensors:
        """Return the slots of the step on the device; the first layer of a step sends them."""
        if self._tensors is None:
            self._tensors = _send(self.step, self._contexts, self.pool.device)
        return self._tensors

    def paged(self, layer: int) -> PagedState:
        """Return a layer's state for the native library."""
        state = self.of_layer[layer]
        return PagedState(self._args, state.places, state.kept)


class LayerState:
    """One layer's state in the step's slots, see parts.py."""

    def __init__(self, pool: StatePool, spec: RecurrentSpec, places: NDArray[np.int32], max_rows: int) -> None:
        self._pool, self._spec, self.places = pool, spec, np.ascontiguousarray(places)
        self._device_places = torch.from_numpy(self.places).to(pool.pool.device)
        shape = (max_rows, pool.max_drafts, spec.row)
        self.kept = torch.zeros(shape, dtype=spec.dtype, device=pool.pool.device)  # inputs of drafts

    @property
    def slices(self) -> list[Slice]:
        """Return the step's slices."""
        step = self._pool.step
        drafts = np.diff(step.starts) - step.kept
        columns = (step.starts[:-1], step.starts[1:], drafts, step.replays, step.midway_after)
        return [Slice(*each) for each in zip(*(column.tolist() for column in columns), strict=True)]

    @property
    def on_device(self) -> DeviceState:
        """Return the state for kernels."""
        return DeviceState(self._spec, self._pool.pool, self._device_places, self.kept, self._pool.tensors())

    def read(self, index: int) -> list[Tensor]:
        """Return copies of what a slice reads."""
        slot = self._pool.step.read[index]
        return [
            self._pool.pool.new_zeros((kind.num, *kind.shape), dtype=kind.dtype)
            if slot[0] < 0
            else self._pool.pool[at].view(kind.dtype).unflatten(1, kind.shape)
            for kind, at in zip(self._spec.pieces, self._bytes(slot), strict=True)
        ]

    def write(self, index: int, pieces: Sequence[Tensor], *, midway: bool = False) -> None:
        """Write what a slice leaves, or what it is midway."""
        slot = (self._pool.step.midway if midway else self._pool.step.written)[index]
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


def _send(step: StepStates, contexts: Sequence[int], device: torch.device) -> StateTensors:
    """Return a step's slots on a device, in one copy."""
    num_own = np.diff(step.starts)
    begins = step.starts + np.concatenate(([0], np.cumsum(step.replays)))
    is_chunked = (num_own > _SHORT) & (step.kept == num_own) & (step.replays == 0)
    chunks, prompts = list[tuple[int, int]](), list[tuple[int, int, int]]()
    for index in np.flatnonzero(is_chunked).tolist():
        num, first = int(num_own[index]), contexts[index] - int(num_own[index])
        cuts = [0, *range(CHUNK - first % CHUNK, num, CHUNK), num]
        prompts.append((index, len(chunks), len(cuts) - 1))
        chunks += [(int(begins[index]) + start, stop - start) for start, stop in pairwise(cuts)]
    arrays = [np.asarray(each, np.int32) for each in (
        *(step.read, step.written, step.starts, step.kept, step.replays, step.rows, begins),
        np.repeat(np.arange(len(num_own)), np.diff(begins)),
        np.flatnonzero(~is_chunked),
        np.reshape(prompts, (-1, 3)),
        np.reshape(chunks, (-1, 2)),
    )]  # fmt: skip
    sent = to_device(np.concatenate([each.ravel() for each in arrays]), torch.int32, device)
    parts = sent.split([each.size for each in arrays])
    return StateTensors(*(part.view(each.shape) for part, each in zip(parts, arrays, strict=True)))
