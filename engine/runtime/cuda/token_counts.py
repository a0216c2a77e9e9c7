"""The counts of tokens for penalties.

cuda/sampling.py computes penalties from the number of occurrences of each token in a text. These counts stay on the
device, one line of the vocabulary for each slot, and each step adds the new tokens. A line is cleared when another
sequence takes its slot, or when a rolled back step is planned again. An id that the host does not know yet (overlap) is
read from `last_ids`. Nothing waits for the device. Engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.core.rows import SequenceSlice
from engine.runtime.cuda.sampling import IN_PROMPT, Penalties
from engine.runtime.transfer import to_device

_ENTRIES = 256  # a program's
_DRAWN = -1  # in place of a token: the last one drawn for the slot


class _Line(NamedTuple):
    """The sequence that a line counts, and the length of its counted text."""

    seq_id: int
    length: int


class TokenCounts:
    """Occurrences of each token in the texts of penalised sequences, by slot."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._counts = torch.zeros((num_slots, vocab_size), dtype=torch.int32, device=device)
        self._lines: dict[int, _Line] = {}

    def penalties(self, rows: Sequence[tuple[int, SequenceSlice]], num_rows: int, last_ids: Tensor) -> Penalties:
        """Return the penalties of `num_rows` rows; the counts include these slices."""
        self._count(list({piece.slot: piece for _, piece in rows}.values()), last_ids)
        slots = np.full(num_rows, -1, np.int32)
        amounts = np.zeros((3, num_rows), np.float32)
        for row, piece in rows:
            params = piece.sampling
            slots[row] = piece.slot
            amounts[:, row] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        columns = to_device(np.vstack((slots, amounts.view(np.int32))), torch.int32, self._counts.device)
        return Penalties(self._counts, columns[0], *columns[1:].view(torch.float32).unbind(0))

    def _count(self, pieces: Sequence[SequenceSlice], last_ids: Tensor) -> None:
        """Update each slice's line to the slice's end."""
        lines = [self._lines.pop(piece.slot, None) for piece in pieces]  # they count as known again after success
        new = np.hstack([self._missing(piece, line) for piece, line in zip(pieces, lines, strict=True)])
        num = new.shape[1]
        entries = to_device(new, torch.int32, self._counts.device)
        grid = (triton.cdiv(num, _ENTRIES),)
        _count_tokens[grid](self._counts, self._counts.shape[1], entries, num, last_ids, BLOCK=_ENTRIES)
        for piece in pieces:
            self._lines[piece.slot] = _Line(piece.seq_id, piece.start + piece.num_tokens)

    def _missing(self, piece: SequenceSlice, line: _Line | None) -> np.ndarray:
        """Return the entries [3, n] missing in a line: slot, token or _DRAWN, and increment."""
        stop = piece.start + piece.num_tokens
        parts: list[np.ndarray] = []
        if line is not None and line.seq_id == piece.seq_id and piece.num_prompt <= line.length < stop:
            begin = line.length
        else:
            begin = piece.num_prompt
            self._counts[piece.slot].zero_()
            prompt = np.unique(np.array(piece.tokens[:begin], np.int32))
            parts.append(np.stack((prompt, np.full_like(prompt, IN_PROMPT))))
        said = [*piece.tokens[begin:stop], *[_DRAWN] * (stop - len(piece.tokens))]
        parts.append(np.array([said, [1] * len(said)], np.int32))
        entries = np.hstack(parts)
        return np.vstack((np.full((1, entries.shape[1]), piece.slot, np.int32), entries))


@triton.jit(do_not_specialize=["num"])
def _count_tokens(counts_ptr, vocab_size, entries_ptr, num, last_ids_ptr, BLOCK: tl.constexpr):
    """Add to the lines by atomics, since a text may repeat a token; integer sums are exact."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entry < num
    slot = tl.load(entries_ptr + entry, is_entry, 0).to(tl.int64)
    token = tl.load(entries_ptr + num + entry, is_entry, 0)
    drawn = tl.load(last_ids_ptr + slot, is_entry & (token < 0), 0)
    token = tl.where(token < 0, drawn, token.to(tl.int64))
    amount = tl.load(entries_ptr + 2 * num + entry, is_entry, 0)
    tl.atomic_add(counts_ptr + slot * vocab_size + token, amount, is_entry, sem="relaxed")
