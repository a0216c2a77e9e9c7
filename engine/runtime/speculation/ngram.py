"""Drafts from the sequence itself: what followed an earlier occurrence of its last tokens.

This prompt lookup helps where an answer repeats its prompt or itself, as in summaries, edits of code and conversations
with documents. It keeps the tokens only, four bytes each, in an array that numpy searches. Engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.core.step import SequenceSlice, StepPlan


@dataclass(slots=True)
class _Text:
    """A sequence's tokens, as far as they are known."""

    seq_id: int
    tokens: NDArray[np.int32]
    length: int = 0

    def catch_up(self, known: Sequence[int]) -> NDArray[np.int32]:
        if len(known) > len(self.tokens):
            self.tokens = np.concatenate([self.tokens[: self.length], np.empty(2 * len(known), np.int32)])
        self.tokens[self.length : len(known)] = known[self.length :]
        self.length = len(known)
        return self.tokens[: self.length]


class NgramDrafter:
    """Finds the latest match of the last `longest` tokens, or of fewer."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._texts: dict[int, _Text] = {}  # by slot

    def draft(self, plan: StepPlan, slices: Sequence[SequenceSlice]) -> dict[int, list[int]]:
        """See Drafter; a sequence whose end occurs nowhere else gets no drafts."""
        drafts = {}
        for index, num_drafts in plan.drafts:
            piece = slices[index]
            text = self._texts.get(piece.slot)
            if text is None or text.seq_id != piece.seq_id:
                text = self._texts[piece.slot] = _Text(piece.seq_id, np.empty(0, np.int32))
            found = continuation(text.catch_up(piece.tokens), self._shortest, self._longest, num_drafts)
            if found:
                drafts[index] = found
        return drafts

    def forget(self, blocks: Sequence[int]) -> None:
        """Texts have no blocks."""

    def close(self) -> None:
        """Forget all texts."""
        self._texts.clear()


def continuation(text: NDArray[np.int32], shortest: int, longest: int, num_tokens: int) -> list[int]:
    """Return the tokens after the latest earlier occurrence of the text's end.

    Returns [] if there is none. If fewer than `num_tokens` follow it, the text is continued as a period.
    """
    length = len(text)
    places = np.flatnonzero(text[:-1] == text[-1])  # earlier occurrences of the last token
    matched = places[:0]
    for size in range(1, min(longest, length - 1) + 1):
        if size > 1:
            places = places[places >= size - 1]
            places = places[text[places - (size - 1)] == text[-size]]
        if not len(places):
            break
        if size >= shortest:
            matched = places
    if not len(matched):
        return []
    follows = int(matched[-1]) + 1
    period = length - follows
    return [int(text[follows + ahead % period]) for ahead in range(num_tokens)]
