"""The pieces of an answer, the base of their parsers, and a model's sampling values. Pure.

A parser reads a model's text while it is being written. Pieces do not depend on how the text was cut. One parser for each
choice; never raises.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})  # variables of chat templates that a request sets


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """The sampling values of a model's generation_config, by default OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None  # of an answer in a chat whose request names no bound
    max_new_tokens: int | None = None  # bounds every answer


class Reasoning(NamedTuple):
    """Thoughts, without their tags."""

    text: str


class Content(NamedTuple):
    """Text for the user."""

    text: str


class CallBegin(NamedTuple):
    """A call; its arguments follow."""

    name: str
    id: str = ""  # that the model gave it, if its format has ids


class CallArguments(NamedTuple):
    """More of the arguments, in JSON, of the last call."""

    text: str


Piece: TypeAlias = Reasoning | Content | CallBegin | CallArguments


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
