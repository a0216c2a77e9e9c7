"""Sends a line of a batch to the endpoint's route, without a socket. Event loop.

The application has the endpoints and nothing around them: no keys, no log line, no count of HTTP requests. The account of
the batch's owner stands in for the key; its limits hold.
"""

from __future__ import annotations

import logging
import time
import uuid
from contextlib import aclosing
from typing import NamedTuple

from starlette.types import ASGIApp

from server.http.in_process import Forwarded, Head, respond
from server.http.middleware import CALLER, RequestState
from server.protocol.errors import STATE, to_api_error
from server.telemetry.events import Listener, RequestEnded
from server.tenancy.tenancy import Account

logger = logging.getLogger(__name__)


class Reply(NamedTuple):
    """An endpoint's answer."""

    status: int
    request_id: str
    body: bytes
    ignored_fields: tuple[str, ...] = ()


class Dispatcher:
    """Asks an application. Cancelling `ask` ends the request in the engine."""

    def __init__(self, app: ASGIApp, emit: Listener) -> None:
        self._app, self._emit = app, emit

    async def ask(self, path: str, document: bytes, account: Account | None) -> Reply:
        """POST a JSON document on an account; there always is a reply."""
        state = RequestState(uuid.uuid4().hex, account=account)
        if account is not None:
            state.owner = account.tenant.name
            CALLER.set(state.owner)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(document)).encode())]
        request = Forwarded("POST", path, b"", headers, document, None)
        status, parts = 0, list[bytes]()
        started_s = time.monotonic()
        try:
            async with aclosing(respond(self._app, request, {STATE: state})) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Head):
                        status = piece.status
                    else:
                        parts.append(piece)
        except Exception as error:  # any: it ends this line alone
            logger.exception("a request of a batch failed")
            error_answer = to_api_error(error)
            status, parts = error_answer.status, [error_answer.body()]
        finally:
            state.leave()
            if state.record is not None:
                self._emit(RequestEnded(state.record, status, time.monotonic() - started_s, is_batch=True))
        return Reply(status, state.request_id, b"".join(parts), tuple(state.ignored_fields))
