"""Describes the parts of a layer to the C library, and what they have of the pool: addresses of tensors that others own."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, addressof
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.runtime.kv_layout import AttentionSpec
from engine.runtime.native.library import (
    DTYPES,
    AttendArgs,
    LinearArgs,
    NormWeight,
    PartArgs,
    Pool,
    ScoresArgs,
    StoreArgs,
    native,
)

_LAYER, _LAYER_OF_STREAM = 1, 2  # as in quire_cpu.h


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """The part of the pool, and of the step, that the library needs for a layer's attention."""

    pool: Pool
    store: StoreArgs  # the same objects in every step, and for all layers of a group
    attend: AttendArgs


@dataclass(frozen=True, slots=True)
class PagedState:
    """The same for a layer with recurrent state."""

    step: Structure  # StepStatesArgs, the same object in every step and for all layers
    places: NDArray[np.int32]
    drafts: Tensor


PagedStep = Sequence[PagedLayer | PagedState]


def norm_args(weight: Tensor | None) -> NormWeight:
    """Describe an RMSNorm, or that there is none."""
    return NormWeight() if weight is None else NormWeight(weight.data_ptr(), DTYPES[weight.dtype])


def layer_norm_args(weight: Tensor, bias: Tensor | None, *, is_of_stream: bool) -> NormWeight:
    """Describe a LayerNorm, whose result may be the stream from then on."""
    kind = _LAYER_OF_STREAM if is_of_stream else _LAYER
    return NormWeight(weight.data_ptr(), DTYPES[weight.dtype], kind, None if bias is None else bias.data_ptr())


def scores_args(spec: AttentionSpec) -> ScoresArgs:
    """Describe how heads attend; C keeps the address of the sinks."""
    assert spec.sinks is None or spec.sinks.dtype is torch.float32
    sinks = None if spec.sinks is None else spec.sinks.data_ptr()
    return ScoresArgs(sinks, spec.num_heads, spec.seen or 0, spec.scale, spec.softcap or 0.0, spec.is_causal)


def describe_part(
    kind: str, matrices: Sequence[LinearArgs | None] = (), args: Structure | None = None
) -> PartArgs | None:
    """Describe a part: its first matrix and its last, and what its kind needs beside, of which C keeps the address.

    None without the library, or without one of the matrices.
    """
    library = native()
    if library is None or any(matrix is None for matrix in matrices):
        return None
    return PartArgs(library.kind(kind), None if args is None else addressof(args), *matrices)
