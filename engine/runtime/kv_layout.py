"""What layers keep in the pool, the layout of K and V there, and the content of a narrow pool.

A layer's K, or V, is [num_blocks, num_kv_heads, block_size, head_dim]. One head's rows of a block are contiguous, and so
are all heads'; blocks may be any number apart, because a block holds other layers too. In a narrow pool, of int8 or fp8
(e4m3), the last dimension is SCALE_BYTES longer: a token's row of one head has numbers up to the PEAK of their type, and
a float32 scale. Engine thread.

fp8 has an exponent, and could do without a scale or with one a head. But keys of some models are larger than 448, and
numbers below 2^-6 lose digits; a scale a head would require calibration. A scale a row is right for all, and the
kernels apply it to scores and weights: one product for each of these instead of one for each number.

Latents are narrow in int8 only. A row has the scale of its latent. The numbers beside the latent, which may be far larger,
are 16-bit integers of that scale: all low bytes, then all high bytes. So they lose no more than the latent does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SCALE_BYTES = 4
PEAKS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the types of narrow pools, and the largest number of each
# Least peak of a row. Smaller ones, such as zeros, are stored as if they had it; otherwise the scale or its inverse
# would not be a normal float32.
SMALLEST_PEAK = 2.0**-116
LINE = 64  # bytes to which the pieces of a recurrent state are aligned in a block
CHUNK = 64  # positions of a prompt that kernels of recurrent layers compute together
_LATENT_RANGE = 257.0  # how much larger than a latent the numbers beside it may be without its losing digits


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One layer's attention, as the model defines it.

    `window` w lets position p see p - w + 1 .. p; None sees all. `softcap` c replaces a score s by c * tanh(s / c).
    `sinks`, shape [num_heads], joins the softmax as one more score a head that carries no value.

    With `source` the layer reads what another state of the model holds, K and V of the same sizes, and keeps none itself.
    With `value_dim` the layer caches latents: one row of `head_dim` numbers a token, shared by all heads. The row is
    the key, its first `value_dim` numbers are the value, and there is no V pool.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    value_dim: int | None = None
    source: int | None = None
    is_causal: bool = False  # whether a token sees none behind it even where a batch says so, as of an image
    reach: int | None = (
        None  # of a layer that attends both ways: how many positions before it and behind it a token sees
    )

    @property
    def seen(self) -> int | None:
        """Return how many positions up to its own a token sees; None for all. A window also says how many are kept."""
        return self.window if self.reach is None else self.reach + 1

    @property
    def is_latent(self) -> bool:
        """Return whether one pool holds the keys, and the values in them."""
        return self.value_dim is not None

    @property
    def num_pools(self) -> int:
        """Return the number of pools: K and V, or one of latents."""
        return 1 if self.is_latent else 2

    def bytes_a_token(self, dtype: torch.dtype) -> int:
        """Return what the layer keeps of a token in a pool of `dtype`."""
        if self.source is not None:
            return 0
        return self.num_pools * self.num_kv_heads * self.pool_dim(dtype) * dtype.itemsize

    def pool_dim(self, dtype: torch.dtype) -> int:
        """Return the width of a row in a pool of `dtype`, in numbers of that type, with a narrow one's scale."""
        if dtype not in PEAKS:
            return self.head_dim
        return 2 * self.head_dim - self.out_dim + SCALE_BYTES

    @property
    def out_dim(self) -> int:
        """Return the width of a head's result."""
        return self.head_dim if self.value_dim is None else self.value_dim


class Pieces(NamedTuple):
    """Equal parts of a recurrent state, each contiguous in one block of the pool."""

    num: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Return the bytes of one piece."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """What one layer keeps of a sequence, of the same size after any number of positions.

    `row` numbers of `dtype` are what a token changes it by, which is kept of drafts until it is known which are right.
    """

    pieces: tuple[Pieces, ...]
    row: int
    dtype: torch.dtype


StateSpec: TypeAlias = AttentionSpec | RecurrentSpec


def attends(specs: Sequence[StateSpec]) -> list[AttentionSpec]:
    """Return the states of layers that attend."""
    return [spec for spec in specs if isinstance(spec, AttentionSpec)]


class StepStates(NamedTuple):
    """The slots of recurrent state in a step of S slices, and how each goes on; on the host, int32."""

    read: NDArray[np.int32]  # [S, blocks of a slot]; -1 at a sequence's beginning, where the state is zero
    written: NDArray[np.int32]
    starts: NDArray[np.int32]  # [S + 1], a slice's rows
    kept: NDArray[np.int32]  # [S], of its rows, after how many the state is written; the others are drafts
    replays: NDArray[np.int32]  # [S], accepted drafts of the step before, which come before its rows
    rows: NDArray[np.int32]  # [S], runner rows
    midway: NDArray[np.int32]  # [S, blocks of a slot], written too: what was read, after replays; or a snapshot
    midway_after: NDArray[np.int32]  # [S], tokens after which the state is written there, replays included; 0: never


class StateTensors(NamedTuple):
    """The slots of a step on a device, for its kernels; int32.

    Virtual rows are the slices' rows, each slice's behind its replays.
    """

    read: Tensor  # as in StepStates
    written: Tensor
    starts: Tensor
    kept: Tensor
    replays: Tensor
    rows: Tensor
    begins: Tensor  # [S + 1], a slice's virtual rows
    slice_of: Tensor  # [V], of each virtual row
    by_token: Tensor  # slices that are computed token by token
    prompts: Tensor  # [P, 3], of other slices: slice, first chunk, chunks
    chunks: Tensor  # [C, 2]: first virtual row, rows; they end at multiples of CHUNK positions


class DeviceState(NamedTuple):
    """One layer's recurrent state for kernels of its device, in a step."""

    spec: RecurrentSpec
    pool: Tensor  # [num_blocks, bytes of a block] uint8
    places: Tensor  # [pieces, 2] int32, as in pool/states.py
    kept: Tensor  # [max_rows, max_drafts, row], inputs of drafts
    step: StateTensors


def pool_shape(
    spec: AttentionSpec, num_blocks: int, block_size: int, dtype: torch.dtype = torch.float32
) -> tuple[int, ...]:
    """Return the shape of one layer's K, or V, or latents, in a pool of `dtype`."""
    return (num_blocks, spec.num_kv_heads, block_size, spec.pool_dim(dtype))


def store(spec: AttentionSpec, slots: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor) -> None:
    """Write rows k, v [T, num_kv_heads, head_dim] at slots [T], if the layer keeps any; of latents k alone."""
    if spec.source is not None:
        return
    blocks, offsets = slots // k_pool.shape[2], slots % k_pool.shape[2]
    for pool, rows in ((k_pool, k), (v_pool, v))[: spec.num_pools]:
        stored = to_pool(rows, pool.dtype, spec.value_dim)
        movable(pool).transpose(1, 2).index_put_((blocks, offsets), movable(stored))


def to_pool(rows: Tensor, dtype: torch.dtype, latent_dim: int | None = None) -> Tensor:
    """Return rows [..., head_dim], perhaps of latents, as stored in a pool of `dtype`; kv_store.h is identical."""
    if dtype not in PEAKS:
        return rows
    if latent_dim is not None:
        assert dtype == torch.int8, "resolve_kv_dtype has refused others"
        return _latents_to_pool(rows.float(), latent_dim)
    wide = rows.float()
    peak = wide.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_PEAK)
    factor = torch.full_like(peak, PEAKS[dtype]) / peak
    # A row with a NaN gets a scale that makes the whole row NaN again.
    numbers = (wide * factor).nan_to_num(0.0)
    numbers = (numbers.round() if dtype == torch.int8 else numbers).to(dtype)
    return torch.cat((movable(numbers), (peak / PEAKS[dtype]).view(torch.int8)), -1).view(dtype)


def _latents_to_pool(rows: Tensor, latent_dim: int) -> Tensor:
    latents, others = rows[..., :latent_dim], rows[..., latent_dim:]
    peak = torch.maximum(
        latents.abs().amax(-1, keepdim=True), others.abs().amax(-1, keepdim=True) / _LATENT_RANGE
    ).clamp(min=SMALLEST_PEAK)
    factor = torch.full_like(peak, PEAKS[torch.int8]) / peak
    low, whole = ((part * factor).nan_to_num(0.0).round().int() for part in (latents, others))
    high = (whole + 128) >> 8
    numbers = torch.cat((low, whole - 256 * high, high), -1).to(torch.int8)
    return torch.cat((numbers, (peak / PEAKS[torch.int8]).view(torch.int8)), -1)


def from_pool(rows: Tensor, dtype: torch.dtype, latent_dim: int | None = None) -> Tensor:
    """Return rows of a pool, perhaps of latents, as numbers of `dtype`."""
    if rows.dtype not in PEAKS:
        return rows
    if latent_dim is not None:
        latents, others = rows[..., :latent_dim].float(), rows[..., latent_dim:-SCALE_BYTES].float()
        low, high = others.chunk(2, -1)
        numbers = torch.cat((latents, low + 256 * high), -1)
        return (numbers * rows[..., -SCALE_BYTES:].view(torch.float32)).to(dtype)
    return (rows[..., :-SCALE_BYTES].float() * rows[..., -SCALE_BYTES:].view(torch.float32)).to(dtype)


def movable(rows: Tensor) -> Tensor:
    """Return the memory in a type that torch can index; fp8 is not one."""
    return rows.view(torch.int8) if rows.dtype == torch.float8_e4m3fn else rows
