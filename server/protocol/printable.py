"""Escapes control characters of texts that are logged."""

from __future__ import annotations

import json


def printable(text: str) -> str:
    """Return a text with JSON's escapes for what is no visible character.

    A client's path or value may hold a newline, which would begin a line that looks like another event, or a terminal's
    commands.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)
