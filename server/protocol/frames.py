"""Server-sent events as bytes. Pure."""

from __future__ import annotations

DONE = b"data: [DONE]\n\n"  # what OpenAI's older streams end with


def frame(document: bytes, event: str = "") -> bytes:
    """One event, named or not. JSON has no raw line breaks, so one data line carries it."""
    data = b"data: " + document + b"\n\n"
    return b"event: " + event.encode() + b"\n" + data if event else data
