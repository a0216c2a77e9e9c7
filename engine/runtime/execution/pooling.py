"""Sums final hidden states for embeddings, as integers in units of POOLED_UNIT.

A floating point sum depends on where it is split, and a prompt is split into chunks by each step's budget. Integers add
exactly, so a vector has the same bits alone, in a batch and in chunks. Engine thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.core.step import POOLED_UNIT, SequenceSlice
from engine.runtime.models.pooler import Pooler

_MOST = 2.0**18  # bound of a valid state: a million of them fit into the 63 bits of a sum


class Pooled(NamedTuple):
    """The sums of P slices."""

    slice_indices: list[int]
    sums: Tensor  # [P, hidden] int64
    is_sane: Tensor  # [P] bool; False if a state was not finite, which makes the sum void

    def to_types(self) -> tuple[Mapping[int, Sequence[int]], list[int]]:
        """Return sums by slice index, and the slices with a void one; tensors on the host."""
        sums = dict(zip(self.slice_indices, self.sums.tolist(), strict=True))
        void = [index for index, sane in zip(self.slice_indices, self.is_sane.tolist(), strict=True) if not sane]
        return {index: total for index, total in sums.items() if index not in void}, void


def pool(
    slices: Sequence[SequenceSlice], first_rows: Sequence[int], hidden: Tensor, pooler: Pooler | None = None
) -> Pooled | None:
    """Sum the states that slices ask for; `hidden` [T, hidden] has all slices' rows.

    With a pooler its result is summed: once for each position, or as often as there are positions.
    """
    indices, sums, sane = [], [], []
    for index, (piece, first_row) in enumerate(zip(slices, first_rows, strict=True)):
        positions = piece.pooled_positions
        if not positions:
            continue
        states = hidden[first_row + positions.start : first_row + positions.stop]
        if pooler is not None:
            own = states if pooler.comes_first else states.double().mean(0, keepdim=True)
            states = pooler(own).expand(len(states), -1)
        states = states.double()
        indices.append(index)
        sane.append((states.abs() < _MOST).all())  # False for NaN as well
        sums.append((states / POOLED_UNIT).round_().long().sum(0))
    return Pooled(indices, torch.stack(sums), torch.stack(sane)) if indices else None
