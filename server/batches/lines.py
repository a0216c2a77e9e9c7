"""Reads a batch's input in pieces, checks every line and notes its place.

A fault that is found here fails the whole batch before anything runs; a fault that only the endpoint finds is that line's
answer. Blocking; called from worker threads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from engine.core.shown import shorten
from server.batches.objects import BatchLine, LineError
from server.http.bodies import BodyReader
from server.protocol.errors import ApiError, to_api_error

MAX_LINES = 50_000
MAX_ERRORS = 50  # reported for one input
PIECE_BYTES = 4 * 1024 * 1024


class Line(NamedTuple):
    """A valid line, and its place in the file."""

    number: int  # in the file, from 1
    start: int
    size: int
    custom_id: str


@dataclass(slots=True)
class Piece:
    """Consecutive lines; by default none, at the beginning of a file."""

    next_number: int = 1
    end: int = 0
    lines: list[Line] = field(default_factory=list)
    errors: list[LineError] = field(default_factory=list)
    is_last: bool = False


def read_piece(path: Path, endpoint: str, bodies: BodyReader, max_line_bytes: int, before: Piece) -> Piece:
    """Check the lines after a piece; blank ones are skipped."""
    piece = Piece(before.next_number, before.end)
    with path.open("rb") as file:
        file.seek(piece.end)
        while piece.end - before.end < PIECE_BYTES and len(piece.errors) < MAX_ERRORS:
            raw = file.readline(max_line_bytes + 1)
            if not raw:
                piece.is_last = True
                break
            if len(raw) > max_line_bytes:
                message = f"The line is longer than {max_line_bytes} bytes (--max-body-bytes); shorten it."
                piece.errors.append(LineError(code="request_too_large", message=message, line=piece.next_number))
                piece.is_last = True
                break
            _check(raw, endpoint, bodies, piece)
            piece.end += len(raw)
            piece.next_number += 1
    return piece


def read_body(path: Path, bodies: BodyReader, start: int, size: int) -> bytes:
    """Return a checked line's request body, with numbers that JSON does not have."""
    with path.open("rb") as file:
        file.seek(start)
        return bodies.read_member(BatchLine, file.read(size), "body")


def _check(raw: bytes, endpoint: str, bodies: BodyReader, piece: Piece) -> None:
    """Add a line or its fault. Raises ApiError if it cannot be checked."""
    text = raw.rstrip()
    if not text:
        return
    try:
        line = bodies.read_here(BatchLine, text)
        if line.url != endpoint:
            message = f"url is {shorten(line.url)!r}, but the batch is for {endpoint}; make one batch an endpoint."
            raise ApiError(400, "invalid_value", message, "url")
        if line.body.get("stream"):
            message = "stream has no meaning in a batch: answers are written to a file; leave it out."
            raise ApiError(400, "unsupported_parameter", message, "body.stream")
    except (ApiError, ValidationError) as error:
        fault = to_api_error(error)
        if fault.status >= 500:
            raise
        message = fault.message.replace(" at line 1 column ", " at column ")
        piece.errors.append(LineError(code=fault.code, message=message, param=fault.param, line=piece.next_number))
    else:
        piece.lines.append(Line(piece.next_number, piece.end, len(raw), line.custom_id))
