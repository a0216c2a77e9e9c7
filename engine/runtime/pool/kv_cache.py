"""The paged K/V pool: its tensors, and copies of blocks; states.py has the recurrent states in it.

Owned by the runner, engine thread. It knows layers and blocks, never sequences. The layout of the tensors is the
attention backend's; bound together, pool and backend are the `attention` that a model calls.

The pool is fresh memory: the first write to a page waits until the system has found and cleared it. A server under load
makes first writes until it has used its whole pool once. Blocks are handed out in ascending order, so the next ones are
known, and memory of the host is prepared for them while the engine is idle.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.errors import MemoryBudgetError
from engine.runtime import huge_pages
from engine.runtime.attention.backend import AttentionBackend, Batch, Rotation
from engine.runtime.kv_layout import (
    AttentionSpec,
    StateSpec,
    attends,
    movable,
    pool_shape,
)
from engine.runtime.layers.model_config import narrow_latents
from engine.runtime.layers.parts import FromProjected, RecurrentState
from engine.runtime.native.parts import PagedLayer, PagedState, PagedStep
from engine.runtime.pool import pool_size
from engine.runtime.pool.groups import NO_GROUP, LayerGroups, one_group
from engine.runtime.stores import pinned
from engine.runtime.stores.host import split_rows
from engine.runtime.transfer import to_device

if TYPE_CHECKING:
    from engine.runtime.pool.states import StatePool

_AHEAD_BYTES = 512 << 20  # prepared beyond the used part: enough for a burst; an idle server holds this much too much
_PIECE_BYTES = 2 << 20  # one piece; a request that arrives meanwhile waits for it


class Headroom:
    """Tracks how far into the pool memory is prepared."""

    def __init__(self, blocks: Tensor) -> None:
        """`blocks`: the pool, [num_blocks, ...], contiguous."""
        self._blocks = blocks
        block_bytes = max(blocks[0].nbytes, 1)
        self._piece, self._ahead = -(-_PIECE_BYTES // block_bytes), _AHEAD_BYTES // block_bytes
        self._num_ready = 0
        self._wait_until = 0  # blocks in use before the system is asked again, after it refused

    def grow(self, num_used: int) -> bool:
        """Prepare another piece (milliseconds) beyond the first `num_used` blocks; return False if there is enough.

        Also False if the system refuses or cannot do it; it is asked again after one more piece is in use.
        """
        begin = max(self._num_ready, num_used)
        end = min(num_used + self._ahead, len(self._blocks))
        if begin >= end or num_used < self._wait_until:
            return False
        end = min(begin + self._piece, end)
        if not huge_pages.populate(self._blocks[begin:end]):
            self._wait_until = num_used + self._piece
            return False
        self._num_ready = end
        return True


_MIB = 1 << 20


class KVCache:
    """K and V of every layer, or its recurrent state, and the LayerStates over them."""

    def __init__(
        self,
        specs: Sequence[StateSpec],
        backend: AttentionBackend,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        groups: LayerGroups | None = None,
        max_rows: int = 0,
        max_drafts: int = 0,
    ) -> None:
        """Allocate the pool in `dtype`; a narrow type has a scale for every row.

        `groups` have a batch each; by default all layers are one. With recurrent layers each of `max_rows` runner rows has
        memory for so many drafts beside the pool. Raises ConfigError if the device does not support the
        type, MemoryBudgetError if it lacks the memory.
        """
        if dtype == torch.float8_e4m3fn:
            pool_size.require_fp8(device)
        if dtype == torch.int8 and device.type != "cpu" and any(spec.is_latent for spec in attends(specs)):
            raise narrow_latents("int8")
        self.groups = groups = groups or one_group(specs, dtype)
        self._dtype, self._device = dtype, device
        self._specs = {index: spec for index, spec in enumerate(specs) if isinstance(spec, AttentionSpec)}
        self._backends = [backend, *(backend.another() for _ in groups.windows)]  # one a group
        self._backend_of = {  # by layer
            index: self._backends[group] for index, group in enumerate(groups.group_of) if group != NO_GROUP
        }
        for spec in self._specs.values():
            backend.check(spec, dtype)
        # Block b of all layers is contiguous in main memory: then a new block is one piece of new memory. With one tensor a
        # layer, all would reach a new huge page in the same step, which would wait until hundreds of pages are cleared.
        # On a GPU the tensors of a block's places are apart.
        cuts = groups.cuts[-1:] if device.type == "cpu" else groups.cuts
        self._parts = _allocate(num_blocks, [block_size * cut for cut in cuts], dtype, device)
        # Views of the whole pool, block first, in a type that can be copied.
        self.blocks = [movable(part) for part in self._parts]
        self.headroom = Headroom(self.blocks[0]) if device.type == "cpu" else None
        tensors = {
            index: self._tensors(
                spec if spec.source is None else self._specs[spec.source], groups.place_of[index], cuts, block_size
            )
            for index, spec in self._specs.items()
        }
        self._keys, self._values = ({index: pair[at] for index, pair in tensors.items()} for at in (0, 1))
        self._states: StatePool | None = None
        if len(self._specs) < len(specs):
            from engine.runtime.pool.states import StatePool

            self._states = StatePool(specs, self._parts[0].view(torch.uint8), max_rows, max_drafts)
        # The whole pool, for the native library.
        self.paged_step: PagedStep | None = None
        if backend.capabilities.native:
            self.paged_step = [self._paged(index) for index in range(len(specs))]

    def _paged(self, layer: int) -> PagedLayer | PagedState:
        if self._states is not None and layer in self._states.of_layer:
            return self._states.paged(layer)
        keys, values = self._keys[layer], self._values[layer]
        return self._backend_of[layer].paged_layer(self._specs[layer], keys, values)

    def _tensors(self, spec: AttentionSpec, place: int, cuts: Sequence[int], block_size: int) -> tuple[Tensor, Tensor]:
        """Return a layer's K and V at its place in a block: views of the parts."""
        _, *shape = pool_shape(spec, 1, block_size, self._dtype)
        found, size = list[Tensor](), spec.bytes_a_token(self._dtype) // spec.num_pools
        for at in range(place, place + spec.num_pools * size, size):
            index = bisect_right(cuts, at)
            first = (at - (0, *cuts)[index]) * block_size // self._dtype.itemsize
            found.append(self._parts[index][:, first : first + math.prod(shape)].unflatten(1, shape))
        return found[0], found[0][..., : spec.out_dim] if spec.is_latent else found[1]

    def prepare(self, batch: Batch) -> None:
        """Prepare the attention and the states of all layers for a step."""
        if self._states is not None:
            self._states.prepare(batch)
        for backend, each in zip(self._backends, (batch, *batch.others), strict=True):
            backend.prepare(each)

    def recurrent(self, layer: int) -> RecurrentState:
        """Return the state of a layer in the prepared batch."""
        assert self._states is not None, "the layer's spec is recurrent"
        return self._states.of_layer[layer]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of one layer over the prepared batch."""
        return self._backend_of[layer].attend(self._specs[layer], q, k, v, self._keys[layer], self._values[layer])

    @property
    def from_projected(self) -> FromProjected | None:
        """Compute one layer's attention from the projection, with rotation and store."""
        return self._rotate_and_attend if self._backends[0].capabilities.rotates else None

    def _rotate_and_attend(self, layer: int, qkv: Tensor, rotation: Rotation) -> Tensor:
        keys, values = self._keys[layer], self._values[layer]
        return self._backend_of[layer].rotate_and_attend(self._specs[layer], qkv, rotation, keys, values)

    def read_blocks(self, blocks: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Copy blocks out as bytes: rows [blocks, bytes of a block], in main memory."""
        if self._device.type == "cuda":
            pinned.read_blocks(self.blocks, blocks, self._as_numbers(rows))
            return
        for view, part in self._split(rows):
            for block, row in zip(blocks, part, strict=True):
                row.copy_(view[block])

    def write_blocks(self, blocks: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Copy blocks in."""
        if self._device.type == "cuda":
            pinned.write_blocks(self.blocks, blocks, self._as_numbers(rows))
            return
        for view, part in self._split(rows):
            for block, row in zip(blocks, part, strict=True):
                view[block].copy_(row)

    def _split(self, rows: NDArray[np.uint8]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each view of the pool and its part of the rows, in the view's shape."""
        return zip(self.blocks, split_rows(self._as_numbers(rows), self.blocks), strict=True)

    def _as_numbers(self, rows: NDArray[np.uint8]) -> Tensor:
        """The same memory in the pool's type."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warns about rows that are not writable; they are only read
            return torch.from_numpy(rows).view(self.blocks[0].dtype)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, destination); no source is an earlier pair's destination."""
        if self._device.type == "cpu":  # indexing takes torch 0.3 s for a block of SmolLM2, this way 0.03 ms
            for view in self.blocks:
                for source, destination in pairs:
                    view[destination].copy_(view[source])
            return
        sources, destinations = to_device(pairs, torch.int64, self._device).unbind(1)
        for view in self.blocks:  # all sources are read before any destination is written
            view.index_copy_(0, destinations, view.index_select(0, sources))


def _allocate(num_blocks: int, cuts: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return the memory of blocks that are cut at these bytes. Raises MemoryBudgetError."""
    try:
        # Zeros: a kernel that multiplies values after a context's end by a weight of 0 must not read NaN.
        return [
            _zeros((num_blocks, (end - first) // dtype.itemsize), dtype, device) for first, end in pairwise((0, *cuts))
        ]
    except (RuntimeError, MemoryError) as error:  # torch's is the former, on either device
        raise MemoryBudgetError(
            f"A KV pool of {num_blocks} blocks needs {num_blocks * cuts[-1] // _MIB} MiB, which {device.type} memory does "
            "not have; lower --kv-cache-memory-bytes or --gpu-memory-utilization, --max-num-seqs or --max-model-len."
        ) from error


def _zeros(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return huge_pages.zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
