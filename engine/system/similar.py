"""The known name that a misspelt one was meant to be: for settings, commands, fields, keys and paths alike."""

from __future__ import annotations

from collections.abc import Iterable

_MAX_CHARS = 64  # comparing takes the product of both lengths


def closest(word: str, known: Iterable[str]) -> str:
    """Return the known word that a misspelt or unfinished one was meant to be, or ""."""
    word, known = word[:_MAX_CHARS], list(known)
    limit = max(1, len(word) // 6)
    near = min(((_distance(word, each), each) for each in known), default=(limit + 1, ""))
    if near[0] <= limit and len(word.strip("-")) > 2:
        return near[1]
    return next((each for each in known if each.startswith(f"{word}_")), "")


def _distance(a: str, b: str) -> int:
    """Return how many letters to insert, delete, change or swap with a neighbour to make one word of the other."""
    before, last = list[int](), list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        row = [i]
        for j, other in enumerate(b, 1):
            row.append(min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (letter != other)))
            if i > 1 and j > 1 and (a[i - 2], letter) == (other, b[j - 2]):
                row[j] = min(row[j], before[j - 2] + 1)
        before, last = last, row
    return last[-1]
