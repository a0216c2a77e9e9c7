"""Reads JSON bodies: small ones in turns of the event loop, large ones in a child process; callers are served in rotation.

A route's dependency `json_body` checks a request's headers and limits, reads the body, and reports fields without effect.

Parsers hold the GIL, so a thread would not help: a text of 30 MiB with escapes stops every stream for 90 ms with orjson and
for 125 ms with pydantic's. The child (server/http/body_child.py) refuses invalid bodies and returns the document by marshal,
which is read in 20 ms. A worker thread then validates it again, which is cheap for a valid document of few objects, and makes
the same model that a small body becomes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import marshal
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from threading import Lock
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel
from pydantic_core import from_json, to_json
from starlette.requests import Request

from engine.core.shown import shorten
from engine.system.child_process import ChildCrashError, ChildError, ChildProcess, ChildTimeoutError
from engine.system.similar import closest
from engine.text.fields.body import RequestBody
from server.http.middleware import CALLER, RequestState, Turns
from server.http.threads import Worker, run_slowly, unless_disconnected
from server.protocol.errors import STATE, ApiError
from server.settings.app_config import AppConfig
from server.telemetry.events import FieldIgnored, Listener

logger = logging.getLogger(__name__)

INLINE_BYTES = 256 * 1024
INLINE_VALUES = 32 * 1024  # about 3 ms
MAX_READ_S = 20.0
LOADING_S = 1.0  # between two comments of a stream whose model is being loaded
FREE_BYTES = 64 * 1024  # of each body, which count on no caller
MAX_HELD_BODIES = 8  # of the largest size: the bytes of incomplete, unread or waiting bodies that are held at most

# A value that takes the memory of several numbers counts as several.
CONTAINER_WEIGHT = 32  # an object or a list, with its first item
STRING_WEIGHT = 4  # a text or a field's name
_PIECE_BYTES = 1 << 16

MAX_NAMED_FIELDS = 20
_MAX_EXPLAINED = 3  # unknown fields for which a declared one is suggested

_STREAM = [  # the headers of EventStream
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
]

Checked = TypeVar("Checked", bound=BaseModel)
Body = TypeVar("Body", bound=RequestBody)

IS_LARGE: ContextVar[bool] = ContextVar("is_large", default=False)  # whether the body of this request is


def json_body(model: type[Body], *, spends: bool = False, loads: bool = True) -> Callable[[Request], Awaitable[Body]]:
    """Return a dependency that reads and checks a JSON body, and loads the model that it names, unless `loads` is False.

    With `spends` the request runs the engine, and its account's limits are checked before the body is read.
    """

    async def read(request: Request) -> Body:
        reader: RequestReader = request.app.state.reader
        return await reader.read(request, model, spends=spends, loads=loads)

    return read


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
    """Return a parsed document, with or without a byte order mark. Raises a 400 if it is not JSON."""
    raw = raw.removeprefix(BOM_UTF8)
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


class HeldBytes:
    """Counts bytes that callers hold. Any thread.

    A caller may hold as many as are still free, so that there is room for another one, however many the first ones never
    give back.
    """

    def __init__(self, most: int) -> None:
        self._num_free, self._held = most, Counter[str]()
        self._lock = Lock()

    def of(self, caller: str) -> int:
        """Return the bytes that a caller holds."""
        return self._held[caller]

    def take(self, caller: str, num_bytes: int) -> bool:
        """Count bytes on a caller; returns False, and counts nothing, if that is too much."""
        with self._lock:
            if self._held[caller] + num_bytes > self._num_free:
                return False
            self._num_free -= num_bytes
            self._held[caller] += num_bytes
            return True

    def give(self, caller: str, num_bytes: int) -> None:
        """Count bytes as held no longer."""
        with self._lock:
            self._num_free += num_bytes
            self._held[caller] -= num_bytes
            if not self._held[caller]:
                del self._held[caller]


class BodyReader:
    """Reads bodies; `read_here` and `read_member` may run on worker threads."""

    def __init__(self, max_values: int, max_body_bytes: int) -> None:
        """`max_values` bounds the JSON values of a body, as count_values counts them."""
        self._max_values = max_values
        self._held = HeldBytes(MAX_HELD_BODIES * max(max_body_bytes - FREE_BYTES, FREE_BYTES))
        self.turns = Turns()
        self.child = ChildProcess("server.http.body_child", limit_s=MAX_READ_S)
        self._asking = Worker("quire-bodies")

    @asynccontextmanager
    async def receive(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytearray]:
        """Yield a body as it was sent. Raises ApiError.

        The bytes of a body beyond FREE_BYTES count as held until the end of the block.
        """
        raw, num_bytes, caller = bytearray(), 0, CALLER.get()
        try:
            async for piece in pieces:
                more = max(len(raw) + len(piece) - FREE_BYTES, 0) - num_bytes
                if more and not self._held.take(caller, more):
                    raise _not_read(
                        f"{self._held.of(caller)} bytes of your large bodies wait; try again later, or send less."
                    )
                num_bytes += more
                raw += piece
            yield raw
        finally:
            if num_bytes:
                self._held.give(caller, num_bytes)

    async def read(self, model: type[Checked], raw: bytearray) -> Checked:
        """Return a large body as a model, and empty `raw`. Raises ApiError and others."""
        parts = await self._asking.run(lambda: self._ask(model, raw))
        return await run_slowly(lambda: model.model_validate(_document(parts)))

    def read_here(self, model: type[Checked], raw: bytes | bytearray) -> Checked:
        """Return a body as a model, read on the calling thread."""
        if is_large(raw):
            return model.model_validate(_document(self._ask(model, bytearray(raw))))
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


def _document(answer: list[bytearray]) -> Any:
    """Return the document in the child's answer, and empty it."""
    return marshal.loads(answer.pop())  # noqa: S302 - the child writes it; a client's bytes are JSON


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


class ModelFinder(Protocol):
    """The models that requests name; server/answers/models.py has them."""

    @property
    def request_s(self) -> float:
        """Return how long requests take on average."""

    def find(self, name: str | None) -> Any:
        """Return a model. Raises a 404."""

    async def use(self, entry: Any, holder: Any) -> Any:
        """Return the parts of a model once it is loaded, which the holder then keeps. Raises a 503."""


class RequestReader:
    """Checks a request's headers and limits, and reads its body."""

    def __init__(self, bodies: BodyReader, models: ModelFinder, config: AppConfig, emit: Listener) -> None:
        self._bodies, self._models, self._emit = bodies, models, emit
        self._keep_alive_s = config.sse_keep_alive_interval_s
        self._max_bytes, self._is_strict = config.max_body_bytes, config.strict_fields
        # What a daemon of this role does not do with a hand-over.
        self._drops_decode, self._drops_prefill = config.role != "prefill", config.role != "decode"

    async def read(self, request: Request, model: type[Body], *, spends: bool, loads: bool) -> Body:
        """Return the body. Unknown fields and dropped hints are named in a header, or refused with --strict-fields."""
        state: RequestState = request.scope[STATE]
        if spends and state.account is not None:
            state.enter(self._models.request_s)
        too_large = f"The request body is larger than {self._max_bytes} bytes; send less (--max-body-bytes)."
        pieces = limited(request, self._max_bytes, too_large)
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            shown = shorten(media_type) or "absent"
            raise ApiError(400, "unsupported_media_type", f"The Content-Type is {shown}; send application/json.")
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.strip().lower() != "identity":
            message = f"The Content-Encoding is {shorten(encoding)}; send the body as it is."
            raise ApiError(400, "unsupported_media_type", message)
        async with self._bodies.receive(pieces) as raw:
            await self._bodies.turns.take()
            IS_LARGE.set(is_large(raw))
            body = await self._bodies.read(model, raw) if IS_LARGE.get() else self._bodies.read_small(model, raw)
            names = await self._use_model(request, body) if loads else body.ignored_fields()  # may wait for a load
        transfer = getattr(body, "kv_transfer_params", None)
        if transfer is not None and self._drops(transfer):
            names.append("kv_transfer_params")
        if names:
            self._report(state, model, names)
        return body

    async def _use_model(self, request: Request, body: RequestBody) -> list[str]:
        """Load the model that the body names, and return the fields without effect there."""
        state: RequestState = request.scope[STATE]
        entry = self._models.find(getattr(body, "model", None))
        if entry.is_ready:
            parts = await self._models.use(entry, state)
        else:
            is_silent = state.begun_s is None or not getattr(body, "stream", False)
            loading = self._models.use(entry, state) if is_silent else self._commented(request, entry)
            parts = await unless_disconnected(request.receive, loading)
        find = partial(body.without_effect, parts.model.limits)
        return await run_slowly(find) if IS_LARGE.get() else find()

    async def _commented(self, request: Request, entry: Any) -> Any:
        """Return a model's parts once it is loaded; meanwhile the request's stream has begun, with comments."""
        state, rest_s = request.scope[STATE], self._keep_alive_s or None
        loading = asyncio.ensure_future(self._models.use(entry, state))
        try:
            while not (await asyncio.wait((loading,), timeout=rest_s and min(rest_s, LOADING_S)))[0]:
                if state.late_status is None:
                    state.late_status = 0
                    await request._send({"type": "http.response.start", "status": 200, "headers": _STREAM})  # noqa: SLF001
                comment = f": loading {entry.name}\n\n".encode()
                await request._send({"type": "http.response.body", "body": comment, "more_body": True})  # noqa: SLF001
            return loading.result()
        finally:
            loading.cancel()

    def _drops(self, transfer: Any) -> bool:
        """Return whether the field asks for what a daemon of another role would do."""
        if not hasattr(transfer, "do_remote_decode"):
            return False
        return (transfer.do_remote_decode and self._drops_decode) or (
            transfer.do_remote_prefill and self._drops_prefill
        )

    def _report(self, state: RequestState, model: type[RequestBody], names: list[str]) -> None:
        """Report fields without effect, or refuse them."""
        named, num_more = names[:MAX_NAMED_FIELDS], len(names) - MAX_NAMED_FIELDS
        shown = [*named, f"and {num_more} more"] if num_more > 0 else named
        hints = [f"{meant} for {name}" for name in names[:_MAX_EXPLAINED] if (meant := _close_field(model, name))]
        hint = f" Did you mean {', '.join(hints)}?" if hints else ""
        if self._is_strict:
            message = f"Fields without effect: {', '.join(shown)}; remove them (--strict-fields)."
            raise ApiError(400, "unknown_parameter", message + hint, names[0])
        state.ignored_fields = shown
        logger.warning("ignored fields: %s.%s", ", ".join(shown), hint)
        for name in named:
            self._emit(FieldIgnored(name))


@lru_cache(maxsize=256)  # clients send the same unknown fields with every request
def _close_field(model: type[RequestBody], name: str) -> str:
    fields = [each for each in model.model_fields if each != name]
    return closest(name, fields)
