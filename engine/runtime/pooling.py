"""Final hidden states summed up for prompts that become vectors (embeddings), as whole numbers of POOLED_UNIT.

A sum of floating point numbers depends on where it is cut, and a prompt is cut into chunks wherever a step's budget
ends. Whole numbers add up exactly, so that a vector is the same bits alone, in a batch and in chunks. Engine thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.core.step import POOLED_UNIT, SequenceSlice

_MOST = 2.0**18  # of a state that makes sense: a million of them still fit into the 63 bits of a sum


class Pooled(NamedTuple):
    """The sums of P slices."""

    slice_indices: list[int]
    sums: Tensor  # [P, hidden] int64
    is_sane: Tensor  # [P] bool; False where a state was not a finite number, and the sum is void

    def to_types(self) -> tuple[Mapping[int, Sequence[int]], list[int]]:
        """Sums by slice index, and the slices without one. The tensors must be on the host."""
        sums = dict(zip(self.slice_indices, self.sums.tolist(), strict=True))
        void = [index for index, sane in zip(self.slice_indices, self.is_sane.tolist(), strict=True) if not sane]
        return {index: total for index, total in sums.items() if index not in void}, void


def pool(slices: Sequence[SequenceSlice], first_rows: Sequence[int], hidden: Tensor) -> Pooled | None:
    """Sum up what slices ask for; `hidden` [T, hidden] has the rows of all of them."""
    indices, sums, sane = [], [], []
    for index, (piece, first_row) in enumerate(zip(slices, first_rows, strict=True)):
        positions = piece.pooled_positions
        if not positions:
            continue
        states = hidden[first_row + positions.start : first_row + positions.stop].double()
        indices.append(index)
        sane.append((states.abs() < _MOST).all())  # so is no NaN
        sums.append((states / POOLED_UNIT).round_().long().sum(0))
    return Pooled(indices, torch.stack(sums), torch.stack(sane)) if indices else None
