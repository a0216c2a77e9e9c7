"""Base of the parsers that read a model's text while it is being written.

Pieces do not depend on how the text was cut. One parser for each choice; never raises.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from engine.text.types import Piece


def held_back(text: str, marks: tuple[str, ...]) -> int:
    """Return the length of the end of `text` that may still become one of the marks."""
    longest = min(max(map(len, marks), default=0) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if any(mark.startswith(text[-size:]) for mark in marks)), 0)


def first_of(text: str, marks: Iterable[str]) -> tuple[int, str] | None:
    """Return the position of the first mark, and the mark."""
    return min(((at, mark) for mark in marks if (at := text.find(mark)) >= 0), default=None)


class PieceParser(ABC):
    """`push` text as it arrives.

    A step reads some of the buffer, perhaps sets the next step, and returns True; or it returns False and waits for more.
    """

    def __init__(self, first_step: Callable[[], bool]) -> None:
        self._step = first_step
        self._buffer = ""  # not read yet
        self._pieces: list[Piece] = []

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that are certain now."""
        self._buffer += text
        while self._buffer and self._step():
            pass
        return self._take()

    @abstractmethod
    def finish(self) -> list[Piece]:
        """Return what was held back. Ends the text."""

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces
