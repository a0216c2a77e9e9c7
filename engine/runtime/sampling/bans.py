"""Finds tokens that would complete a bad word, which rows must not draw.

Engine thread. A decode step may be launched before the host knows the last token. Then the ban is conditional: the
device compares the token that was drawn for the slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from engine.core.rows import SequenceSlice


class Ban(NamedTuple):
    """A banned token of a row: always, or if `slot` drew the token `drawn` last."""

    row: int
    token: int
    slot: int = 0
    drawn: int = -1


def bad_endings(row: int, piece: SequenceSlice) -> Iterator[Ban]:
    """Yield the bans of a slice whose answer may end with the start of a bad word."""
    position = piece.start + piece.num_tokens
    for word in piece.params.bad_words:
        begin, num_before = position - len(word) + 1, len(word) - 1
        if begin < piece.num_prompt:
            continue  # the prompt is not part of the answer
        known = piece.tokens[begin:position] if num_before else ()
        if tuple(known) != word[: len(known)]:
            continue
        yield Ban(row, word[-1]) if len(known) == num_before else Ban(row, word[-1], piece.slot, word[-2])
