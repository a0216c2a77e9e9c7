"""Reads JSON bodies: small ones in turns of the event loop, large ones in a child process; callers are served in rotation.

json and pydantic hold the GIL, so a thread would not help: parsing the largest body would stop every
stream for 80 ms. The child (server/http/body_child.py) refuses invalid bodies and returns the document in compact parts. A
worker thread then validates the parts again, which is cheap for a valid document of few objects, and makes the same model
that a small body becomes.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import from_json, to_json
from starlette.requests import Request

from engine.system.child_process import ChildCrashError, ChildError, ChildProcess, ChildTimeoutError
from server.http.packed_json import unpack
from server.http.threads import Worker, run_slowly
from server.http.turns import CALLER, Turns
from server.protocol.errors import ApiError

logger = logging.getLogger(__name__)

INLINE_BYTES = 256 * 1024
INLINE_VALUES = 32 * 1024  # about 3 ms
MAX_READ_S = 20.0
FREE_BYTES = 64 * 1024  # of each body, which count on no caller
MAX_HELD_BODIES = 8  # of the largest size: the bytes of incomplete or unread bodies that are held at most

# A value that takes the memory of several numbers counts as several.
CONTAINER_WEIGHT = 32  # an object or a list, with its first item
STRING_WEIGHT = 4  # a text or a field's name
_PIECE_BYTES = 1 << 16

Checked = TypeVar("Checked", bound=BaseModel)


def most_values(raw: bytes | bytearray) -> int:
    """Return an upper bound of count_values: text within strings counts, too."""
    return 1 + _marks(raw) + _strings(raw.count(b'"'))


def exceeds(raw: bytes | bytearray, most: int) -> bool:
    """Return whether a document may have more than `most` values; no byte counts for more than a container's."""
    return len(raw) * CONTAINER_WEIGHT > most and most_values(raw) > most


def count_values(raw: bytes | bytearray) -> int:
    """Return the number of JSON values of a document, some of which count as several."""
    total, num_quotes, carried = 1, 0, b""
    for start in range(0, len(raw), _PIECE_BYTES):
        piece = carried + raw[start : start + _PIECE_BYTES]
        kept = piece.rstrip(b"\\")  # an escape is not cut in two
        carried = piece[len(kept) :]
        texts = kept.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        total += _marks(b"".join(texts[num_quotes % 2 :: 2]))
        num_quotes += len(texts) - 1
    return total + _strings(num_quotes)


def _marks(text: bytes | bytearray) -> int:
    """Return the values but the first, from the commas, colons and brackets."""
    num_containers = text.count(b"[") + text.count(b"{")
    return text.count(b",") + text.count(b":") + (CONTAINER_WEIGHT - 1) * num_containers


def _strings(num_quotes: int) -> int:
    """Return the extra count of strings beyond their commas and colons."""
    return (STRING_WEIGHT - 1) * (num_quotes // 2)


def check_count(raw: bytes | bytearray, most: int) -> None:
    """Raise a 400 for a document with more than `most` values."""
    if exceeds(raw, most) and (count := count_values(raw)) > most:
        message = (
            f"The body has {count} JSON values, where a string counts as {STRING_WEIGHT} and a list or object as "
            f"{CONTAINER_WEIGHT}; at most {most} are read (--max-json-values). Send fewer, or several requests."
        )
        raise ApiError(400, "too_many_values", message)


def parse(raw: bytes | bytearray) -> Any:
    """Return a parsed document. Raises a 400 if it is not JSON."""
    if not raw or raw.isspace():
        raise ApiError(400, "invalid_json", "The body is empty; send a JSON object.")
    try:
        return from_json(raw)
    except ValueError as error:
        raise ApiError(400, "invalid_json", f"Invalid JSON: {error}") from error


def is_large(raw: bytes | bytearray) -> bool:
    """Return whether a body is too large to be read on the event loop."""
    return len(raw) > INLINE_BYTES or (exceeds(raw, INLINE_VALUES) and count_values(raw) > INLINE_VALUES)


def limited(request: Request, max_bytes: int, message: str) -> AsyncIterator[bytes]:
    """Return a request's body; raises a 413, as soon as the limit is known exceeded."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise ApiError(413, "request_too_large", message)

    async def pieces() -> AsyncIterator[bytes]:
        received = 0
        async for piece in request.stream():
            received += len(piece)
            if received > max_bytes:
                raise ApiError(413, "request_too_large", message)
            yield piece

    return pieces()


class BodyReader:
    """Reads bodies; `read_here` and `read_member` may run on worker threads."""

    def __init__(self, max_values: int, max_body_bytes: int) -> None:
        """`max_values` bounds the JSON values of a body, as count_values counts them."""
        self._max_values = max_values
        self._most_held = MAX_HELD_BODIES * max(max_body_bytes - FREE_BYTES, FREE_BYTES)
        self._num_held = 0  # bytes
        self._held: Counter[str] = Counter()  # by caller
        self.turns = Turns()
        self.child = ChildProcess("server.http.body_child", limit_s=MAX_READ_S)
        self._asking = Worker("quire-bodies")

    @asynccontextmanager
    async def receive(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytearray]:
        """Yield a body as it was sent. Raises ApiError.

        The bytes of a body beyond FREE_BYTES count as held until the end of the block. A caller may hold as many as are
        still free, so that there is room for another caller, however many bodies the first ones never end.
        """
        raw, num_bytes, caller = bytearray(), 0, CALLER.get()
        try:
            async for piece in pieces:
                more = max(len(raw) + len(piece) - FREE_BYTES, 0) - num_bytes
                held = self._held[caller]
                if more and held + more > self._most_held - self._num_held:
                    raise _not_read(
                        f"{held} bytes of your large bodies wait to be read; try again later, or send less."
                    )
                if more:
                    self._hold(caller, more)
                num_bytes += more
                raw += piece
            yield raw
        finally:
            if num_bytes:
                self._hold(caller, -num_bytes)

    def _hold(self, caller: str, num_bytes: int) -> None:
        self._num_held += num_bytes
        self._held[caller] += num_bytes
        if not self._held[caller]:
            del self._held[caller]

    async def read(self, model: type[Checked], raw: bytearray) -> Checked:
        """Return a large body as a model, and empty `raw`. Raises ApiError and others."""
        parts = await self._asking.run(lambda: self._ask(model, raw))
        return await run_slowly(lambda: model.model_validate(unpack(parts)))

    def read_here(self, model: type[Checked], raw: bytes | bytearray) -> Checked:
        """Return a body as a model, read on the calling thread."""
        if is_large(raw):
            return model.model_validate(unpack(self._ask(model, bytearray(raw))))
        return self.read_small(model, raw)

    def read_small(self, model: type[Checked], raw: bytes | bytearray) -> Checked:
        """Return a body that is not large as a model."""
        check_count(raw, self._max_values)
        return model.model_validate(parse(raw))

    def read_member(self, model: type[Checked], raw: bytes, member: str) -> bytes:
        """Return one member of a body, as JSON."""
        if is_large(raw):
            return bytes(self._ask(model, bytearray(raw), member)[0])
        return to_json(getattr(model.model_validate(parse(raw)), member), inf_nan_mode="constants")

    def close(self) -> None:
        """End the child."""
        self.child.close()
        self._asking.close()

    def _ask(self, model: type[BaseModel], raw: bytearray, member: str | None = None) -> list[bytearray]:
        header = {"model": f"{model.__module__}:{model.__qualname__}", "most": self._max_values, "member": member}
        try:
            answer = self.child.ask([bytearray(json.dumps(header).encode()), raw])
        except ChildError as error:
            raise _refusal(error) from error
        answer_fields = json.loads(answer.pop(0))
        if "error" in answer_fields:
            if answer_fields["traceback"]:
                logger.error("a large request body could not be read:\n%s", answer_fields["traceback"])
            raise ApiError(**answer_fields["error"])
        return answer


def _refusal(error: ChildError) -> ApiError:
    """Return the error for a body that the child could not read."""
    logger.warning("a large request body could not be read: %s", error)
    if isinstance(error, ChildCrashError):
        message = "The body takes too much memory to be read, or is nested too deeply; send fewer JSON values."
        return ApiError(413, "request_too_large", message)
    if isinstance(error, ChildTimeoutError):
        return _not_read(f"The body takes longer than {MAX_READ_S:.0f} s to be read; send less, or try again later.")
    return _not_read("The process that reads large bodies was ended; try again.")


def _not_read(message: str) -> ApiError:
    return ApiError(503, "body_not_read", message, type="server_error", headers={"retry-after": "1"})
