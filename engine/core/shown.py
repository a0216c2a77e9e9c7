"""Values of clients, as errors and logs show them."""

from __future__ import annotations

import json

MAX_SHOWN = 200  # characters of a value that a client sent, so that an error does not send megabytes back


def shorten(text: str) -> str:
    """Cut a text to MAX_SHOWN characters, for an error message."""
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def printable(text: str) -> str:
    """Return a text with JSON's escapes for what is no visible character, for a log.

    A client's path or value may hold a newline, which would begin a line that looks like another event, or a terminal's
    commands.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)
