"""Applies repetition, frequency and presence penalties from ids kept on the device.

Each slot keeps its sequence's ids in one growing tensor, extended by the few new ones at each step, and cleared when
another sequence takes the slot. An id that the host does not know yet (overlap) is read from `last_ids` on the device.
Only tokens that occurred are touched, never a vocabulary-sized table. Engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.core.rows import SequenceSlice
from engine.core.types import SamplingParams
from engine.runtime.transfer import to_device


@dataclass(slots=True)
class _Slot:
    seq_id: int
    ids: Tensor
    length: int = 0


class History:
    """The ids of penalised sequences, by slot."""

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}

    def ids(self, piece: SequenceSlice, last_ids: Tensor) -> Tensor:
        """Return the sequence's ids up to the slice's end, [start + num_tokens] int64."""
        stop = piece.start + piece.num_tokens
        slot = self._slots.get(piece.slot)
        if slot is None or slot.seq_id != piece.seq_id:
            slot = self._slots[piece.slot] = _Slot(piece.seq_id, last_ids.new_empty(0))
        if stop > slot.ids.shape[0]:
            slot.ids = torch.cat([slot.ids, slot.ids.new_empty(stop)])  # at least doubles
        known = min(len(piece.tokens), stop)
        slot.length = min(slot.length, piece.start)  # entries from here on may have been drafts
        if slot.length < known:
            slot.ids[slot.length : known] = to_device(piece.tokens[slot.length : known], torch.int64, last_ids.device)
        if known < stop:
            slot.ids[known:stop] = last_ids[piece.slot]
        slot.length = stop
        return slot.ids[:stop]


class Penalized(NamedTuple):
    """One row of logits to penalise."""

    row: int
    params: SamplingParams
    ids: Tensor  # prompt and generated
    num_prompt: int


def apply_penalties(logits: Tensor, rows: Sequence[Penalized]) -> None:
    """Penalise logits [R, V] in place: repetition first, then frequency and presence."""
    flat = logits.view(-1)
    repeated = [r for r in rows if r.params.repetition_penalty != 1.0]
    if repeated:
        at = _places(repeated, [r.ids for r in repeated], logits.shape[1])
        factor = _spread([r.params.repetition_penalty for r in repeated], [r.ids for r in repeated], logits)
        values = flat[at]
        # A token that occurs twice is written twice with the same value.
        flat[at] = torch.where(values > 0, values / factor, values * factor)
    counted = [r for r in rows if r.params.frequency_penalty != 0.0 or r.params.presence_penalty != 0.0]
    if counted:
        answers = [r.ids[r.num_prompt :] for r in counted]
        at = _places(counted, answers, logits.shape[1])
        flat.index_add_(0, at, -_spread([r.params.frequency_penalty for r in counted], answers, logits))
        flat[at] = flat[at] - _spread([r.params.presence_penalty for r in counted], answers, logits)


def _places(rows: Sequence[Penalized], ids: Sequence[Tensor], vocab_size: int) -> Tensor:
    return torch.cat([each + row.row * vocab_size for row, each in zip(rows, ids, strict=True)])


def _spread(values: Sequence[float], ids: Sequence[Tensor], like: Tensor) -> Tensor:
    """Repeat each row's value for each of its ids."""
    return torch.cat([like.new_full(each.shape, value) for value, each in zip(values, ids, strict=True)])
