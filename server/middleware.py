"""What happens to every HTTP request before and after its route: an id, a body limit, one log line, one count.

Plain ASGI on the event loop: a streamed answer costs one wrapped `send` an event and nothing is buffered. Knows no
route and no protocol.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.core.errors import ShuttingDownError
from server.errors import ApiError, is_disk_full, to_api_error
from server.telemetry.ledger import Entry
from server.telemetry.metrics import Metrics
from server.tenancy.tenancy import TENANT

logger = logging.getLogger(__name__)

_SANE_ID = re.compile(r"[\x21-\x7e]{1,128}")  # of a client's own ids those that we repeat
IGNORED_FIELDS = "ignored_fields"  # the key in the request's state under which routes leave their names
ENTRY = "entry"  # ... and under which the generating ones leave theirs in the ledger, for the log line
REQUEST_ID = "request_id"  # ... and under which they find its id
UPLOAD_PATH = "/v1/files"
FORM_BYTES = 16 * 1024  # what a form may have around its file


class RequestScope:
    """Outermost: gives a request its id, tells what was ignored, counts and logs it, and lets no exception out."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request; an exception that nobody foresaw becomes a 500 if there is still an answer to give."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state[REQUEST_ID] = request_id
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if IGNORED_FIELDS in state:
                    headers["x-quire-ignored-fields"] = ", ".join(state[IGNORED_FIELDS])
                if TENANT in state:
                    entry = state.get(ENTRY)
                    is_open = isinstance(entry, Entry) and entry.generation is not None
                    headers.update(state[TENANT].headers(entry.generation.num_drawn_tokens if is_open else 0))
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except asyncio.CancelledError:  # the server leaves and has waited long enough
            if not status:
                message = "The server is shutting down and could not finish this request; send it again."
                await to_api_error(ShuttingDownError(message)).response()(scope, receive, send_with_headers)
            raise
        except Exception as error:
            if is_disk_full(error):
                logger.error("request %s failed: %s", request_id, error)  # noqa: TRY400 - nothing to trace
            else:
                logger.exception("request %s failed", request_id)
            if not status:
                await to_api_error(error).response()(scope, receive, send_with_headers)
        finally:
            self._conclude(scope, request_id, status, time.monotonic() - started_s)

    def _conclude(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        self._metrics.http_request(route, scope["method"], status, seconds)
        entry = scope["state"].get(ENTRY)
        history = entry.log_fields if isinstance(entry, Entry) else {}
        if isinstance(entry, Entry):
            if entry.generation is not None:
                self._metrics.generation_ended(entry.requests, entry.generation.timeline)
            entry.close(status, seconds)
        level = logging.INFO if scope["method"] == "POST" else logging.DEBUG  # probes and scrapes come all the time
        if not logger.isEnabledFor(level):
            return
        counts = "".join(f", {name} {value}" for name, value in history.items())
        logger.log(
            level,
            "%s %s %d in %.3f s, request %r%s",
            scope["method"],
            route,
            status,
            seconds,
            request_id,
            counts,
            extra={"request_id": request_id, "route": route, "status": status, "seconds": round(seconds, 3), **history},
        )


class OneSpelling:
    """Outermost: what answers GET answers HEAD, without the body, and a path means the same with a slash at its end.

    Everything within sees a GET, and no such slash: a redirect would lose the body of a POST.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on; uvicorn, which keeps its own scope, lets no body of an answer to HEAD out."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        if scope["type"] == "http" and scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await self._app(scope, receive, send)


class BodyLimit:
    """Refuses a body beyond a limit: at once where it announces its length, else as soon as it has grown too far.

    The limit is --max-body-bytes, on UPLOAD_PATH --max-file-bytes and what a form has around its file.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_file_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_file_bytes = max_file_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count what is received; the route's own read of the body raises."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        max_bytes = self._max_bytes
        message = f"The request body is larger than {max_bytes} bytes; send less (--max-body-bytes)."
        if scope["path"] == UPLOAD_PATH:
            max_bytes = self._max_file_bytes + FORM_BYTES
            message = f"The file is larger than {self._max_file_bytes} bytes; split it (--max-file-bytes)."
        too_large = ApiError(413, "request_too_large", message)
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > max_bytes:
            await too_large.response()(scope, receive, send)
            return
        received = 0

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > max_bytes:
                raise too_large
            return message

        await self._app(scope, receive_counted, send)
