"""The state of a request, and the middlewares around all others: ids, ends, unforeseen exceptions, and turns of the event loop.

Plain ASGI on the event loop: nothing is buffered, and tokens that wait for nothing pass by all of it (connection.py). Knows no
route and no protocol. One request works in each turn of the loop, and callers are served in rotation; otherwise all requests
that arrived in one turn would be worked on in that turn, and every probe and stream would wait for their sum. Probes and the
events of streams wait for no turn.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections import deque
from collections.abc import Collection, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from ipaddress import IPv6Address, IPv6Network
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fastapi import Depends, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.core.errors import ShuttingDownError
from engine.core.shown import printable, shorten
from server.protocol.errors import STATE, ApiError, is_disk_full, to_api_error
from server.telemetry.events import Caller, Event, HttpAnswered, Listener, RequestEnded, RequestRecord
from server.telemetry.logs import LineBudget
from server.tenancy.tenancy import DEFAULT, Account

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from server.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

_ID = re.compile(r"[\x21-\x7e]{1,128}")  # a client's id is repeated in headers and logs only if it looks like this


@dataclass(slots=True, eq=False)
class RequestState:
    """Made by the outermost middleware, or for a line of a batch."""

    request_id: str
    begun_s: float | None = None  # Unix time of its arrival; None of a batch line
    is_anthropic: bool = False  # a request of Anthropic's API
    is_background: bool = False  # a line of a batch that runs while the engine is otherwise idle
    held: Any = None  # the model that the body names, see server/answers/models.py
    late_status: int | None = None  # of a stream whose head was sent while its model was loaded; 0 until it is known
    account: Account | None = None  # left by the guard
    owner: str = DEFAULT  # of what the request stores, see server/tenancy/tenancy.py
    is_open: bool = False  # the account counts it
    ignored_fields: Sequence[str] = ()
    record: RequestRecord | None = None  # of one that runs the engine
    error: ApiError | None = None  # that answered it

    def enter(self, request_s: float) -> None:
        """Count the request on its account, once; requests take `request_s` on average.

        Raises OverloadedError at a limit, also if its tokens were used up meanwhile.
        """
        if self.account is None:
            return
        self.account.check(request_s, is_counted=self.is_open)
        if not self.is_open:
            self.is_open = True
            self.account.num_open += 1

    def after_head(self, message: Message) -> Message:
        """Return a message for one that follows the head of a stream with comments, which has no other head."""
        if message["type"] == "http.response.start":
            self.late_status = message["status"]
            return {"type": "http.response.body", "body": b"", "more_body": True}
        if self.late_status in (0, HTTPStatus.OK):
            return message
        return {**message, "body": b"event: error\ndata: " + message["body"] + b"\n\n"}  # an error, in place of events

    def leave(self) -> None:
        """Count the request as open no longer, and let go of its model. Idempotent."""
        if self.held is not None:
            self.held.release()
            self.held = None
        if self.is_open and self.account is not None:
            self.is_open = False
            self.account.num_open -= 1


def state_of(scope: Scope) -> RequestState:
    """Return the state of a request."""
    state: Any = scope[STATE]
    assert isinstance(state, RequestState)
    return state


def part(name: str) -> Any:
    """Return a dependency: the part of the application that `app.state` has under a name."""

    async def find(request: Request) -> Any:  # async, as FastAPI runs plain functions on a thread
        return getattr(request.app.state, name)

    return Depends(find)


class RequestScope:
    """Normalises a request, gives it an id, reports its end, answers exceptions.

    What is inside sees a GET for a HEAD, no slash at the end of a path, because a redirect would lose the body of a POST,
    and no --root-path before it, whether or not the proxy removes it.
    """

    def __init__(self, app: ASGIApp, emit: Listener, tracing: Tracing | None = None, root_path: str = "") -> None:
        self._app, self._emit, self._tracing = app, emit, tracing
        self._root_path = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request; an unforeseen exception becomes a 500, if it still can."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        path = scope["path"].rstrip("/")
        if self._root_path and f"{path}/".startswith(f"{self._root_path}/"):
            path = path.removeprefix(self._root_path)
        path = path or "/"
        # uvicorn keeps the scope with the real method, and sends no body in answer to a HEAD.
        scope = {**scope, "path": path, "method": "GET" if scope["method"] == "HEAD" else scope["method"]}
        state = scope[STATE] = RequestState(request_id, time.time(), _is_anthropic(path, headers))
        status = 0
        span = None if self._tracing is None else self._tracing.begin(scope, headers)

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if status and state.late_status is not None:
                message = state.after_head(message)
            elif message["type"] == "http.response.start":
                status = message["status"]
                self._complete(MutableHeaders(scope=message), state, span)
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except asyncio.CancelledError:  # the server ends, and its time to drain is over
            if not status:
                message = "The server is shutting down and could not finish this request; send it again."
                await to_api_error(ShuttingDownError(message)).response(scope)(scope, receive, send_with_headers)
            raise
        except Exception as error:  # any: it ends this request alone
            if is_disk_full(error):
                logger.error("request %s failed: %s", request_id, error)  # noqa: TRY400 - the traceback adds nothing
            else:
                logger.exception("request %s failed", request_id)
            if not status:
                await to_api_error(error).response(scope)(scope, receive, send_with_headers)
        finally:
            self._conclude(scope, status, time.monotonic() - started_s, span)

    def _complete(self, headers: MutableHeaders, state: RequestState, span: Span | None) -> None:
        """Add the headers that every answer has."""
        headers["x-request-id"] = state.request_id
        if state.is_anthropic:
            headers["request-id"] = state.request_id
        if span is not None and self._tracing is not None:
            headers.update(self._tracing.headers(span))
        if state.ignored_fields:
            headers["x-quire-ignored-fields"] = ", ".join(state.ignored_fields)
        if state.account is not None:
            if state.record is None and state.late_status is None:  # it runs nothing, so it is over
                state.leave()
            generation = None if state.record is None else state.record.generation
            headers.update(state.account.headers(generation.num_drawn_tokens if generation is not None else 0))

    def _conclude(self, scope: Scope, status: int, seconds: float, span: Span | None) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        state = state_of(scope)
        state.leave()
        record = state.record
        self._emit(
            HttpAnswered(
                state.request_id,
                route,
                scope["method"],
                status,
                seconds,
                record,
                span,
                caller=caller_of(scope),
                error=state.error,
                ignored_fields=state.ignored_fields,
            )
        )
        if record is not None:
            self._emit(RequestEnded(record, status, seconds))


def caller_of(scope: Scope) -> Caller:
    """Return the sender of a request; what it chose is cut, and has no control characters."""
    client, state = scope.get("client"), state_of(scope)
    agent = Headers(scope=scope).get("user-agent", "")
    tenant = None if state.account is None else state.account.tenant.name
    assert state.begun_s is not None, "the outermost middleware knows when a request begins"
    path, agent = (shorten(printable(text)) for text in (scope["path"], agent))
    return Caller(path, client[0] if client else "", agent, tenant, state.begun_s)


class AnswerLog:
    """Writes a line for each answered HTTP request, for refused ones within a budget."""

    def __init__(self) -> None:
        self._refusals = LineBudget(logger)

    def observe(self, event: Event) -> None:
        """Write the line of an HttpAnswered."""
        if isinstance(event, HttpAnswered):
            level = logging.INFO if event.is_notable else logging.DEBUG
            if logger.isEnabledFor(level) and (event.status < 400 or self._refusals.take()):
                _log(event, level)


def _log(event: HttpAnswered, level: int) -> None:
    fields = {} if event.record is None else event.record.log_fields(event.status)
    if event.caller is not None and event.caller.tenant is not None:
        fields["tenant"] = event.caller.tenant
    shown = "".join(f", {name} {value}" for name, value in fields.items())
    if event.status >= 400 and event.caller is not None:
        fields["path"] = event.caller.path
        shown += f", path {event.caller.path}"
    if event.error is not None:
        fields |= {"code": event.error.code, "error": event.error.logged}
        shown += f", {event.error.code}: {event.error.logged}"
    words = (event.method, event.route, event.status, event.seconds, event.request_id, shown)
    named = {"request_id": event.request_id, "route": event.route, "status": event.status}
    extra = {**named, "seconds": round(event.seconds, 3), **fields}
    if event.span is not None:
        extra["trace_id"] = f"{event.span.get_span_context().trace_id:032x}"
    logger.log(level, "%s %s %d in %.3f s, request %r%s", *words, extra=extra)


def _is_anthropic(path: str, headers: Headers) -> bool:
    """Return whether a request is one of Anthropic's API.

    On paths that both APIs have, its clients name its version.
    """
    if path.startswith("/v1/models"):
        return "anthropic-version" in headers
    return path == "/v1/messages" or path.startswith("/v1/messages/")


SMALL_BYTES = 4096  # of a body; a caller's smaller requests do not wait for its larger ones

CALLER: ContextVar[str] = ContextVar("caller", default="")  # of this request: its account or, without keys, its address
_QUEUE: ContextVar[Hashable] = ContextVar("queue", default="")

Item = TypeVar("Item")


class Rotation(Generic[Item]):
    """Items in queues, one of which has the next turn."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[Item]] = {}

    def put(self, queue: Hashable, item: Item) -> None:
        """Add an item to the end of a queue."""
        self._queues.setdefault(queue, deque()).append(item)

    def take(self) -> Item | None:
        """Remove and return the next item; its queue goes behind the others."""
        for queue, items in self._queues.items():
            del self._queues[queue]
            item = items.popleft()
            if items:
                self._queues[queue] = items
            return item
        return None


class Turns:
    """The turns of the event loop, each for one request."""

    def __init__(self) -> None:
        self._holder: object = None  # the task whose turn it is
        self._waiting: Rotation[asyncio.Future[None]] = Rotation()

    async def take(self) -> None:
        """Wait for a turn; this task has it until its next wait for anything else."""
        task = asyncio.current_task()
        if self._holder is task:
            return
        loop = asyncio.get_running_loop()
        if self._holder is not None:
            granted = loop.create_future()
            self._waiting.put(_QUEUE.get(), granted)
            await granted
        else:
            loop.call_soon(self._pass_on)
        self._holder = task

    def _pass_on(self) -> None:
        """Give the loop's next turn to a task that waits."""
        self._holder = None
        while granted := self._waiting.take():
            if not granted.done():  # else its task was cancelled
                self._holder = granted
                granted.set_result(None)
                asyncio.get_running_loop().call_soon(self._pass_on)  # runs behind the task
                return


class TurnTaker:
    """ASGI middleware: names the caller of a request, and begins it in a turn."""

    def __init__(self, app: ASGIApp, turns: Turns, open_paths: Collection[str]) -> None:
        """Requests of `open_paths` wait for nothing."""
        self._app, self._turns, self._open_paths = app, turns, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request when its turn has come."""
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            caller = _caller(scope)
            CALLER.set(caller)
            _QUEUE.set((caller, _is_small(scope)))
            await self._turns.take()
        await self._app(scope, receive, send)


def _caller(scope: Scope) -> str:
    """Return the account's name or, without one, the client's address."""
    state: RequestState = scope[STATE]
    account = state.account
    return _network((scope.get("client") or ("",))[0]) if account is None else account.tenant.name


@lru_cache(maxsize=1024)
def _network(host: str) -> str:
    """Return an address, of IPv6 its network, all of which one client may have."""
    if ":" not in host:
        return host
    address = IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or IPv6Network((address, 64), strict=False))


def _is_small(scope: Scope) -> bool:
    """Return whether a request announces a small body, or none."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return bool(value.isdigit() and len(value) < 9 and int(value) <= SMALL_BYTES)
        if name == b"transfer-encoding":
            return False
    return True
