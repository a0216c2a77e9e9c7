"""Markdown for generated pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

MADE = "Made from the code by `python -m tests.reference`; a test compares them, so this page describes this version."


def cell(text: str) -> str:
    """Return a text as a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of a table; cells are Markdown."""
    heads = list(heads)
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""
