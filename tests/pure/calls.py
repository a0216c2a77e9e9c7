"""What a parser of tool calls finds in a text, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from engine.text.types import CallArguments, CallBegin, Content, Piece, PieceParser


def merge(pieces: Iterable[Piece]) -> list[Any]:
    """Content as strings, calls as [name, arguments], pieces of the same thing joined."""
    merged: list[Any] = []
    for piece in pieces:
        if isinstance(piece, CallBegin):
            merged.append([piece.name, ""])
        elif isinstance(piece, CallArguments):
            merged[-1][1] += piece.text
        elif merged and isinstance(merged[-1], str):
            merged[-1] += piece.text
        else:
            merged.append(piece.text)
    return merged


def parsed(parser: PieceParser, *texts: str) -> list[Any]:
    """What the parser finds in a text that comes in parts. No piece of it is empty."""
    pieces = [*(piece for text in texts for piece in parser.push(text)), *parser.finish()]
    assert all(piece.text for piece in pieces if isinstance(piece, Content | CallArguments))
    return merge(pieces)


def check_in_pieces(parse: Callable[..., object], text: str, expected: object) -> None:
    """A text is parsed alike whole, letter by letter, and in any two pieces."""
    assert parse(text) == expected
    assert parse(*text) == expected
    for cut in range(len(text) + 1):
        assert parse(text[:cut], text[cut:]) == expected
