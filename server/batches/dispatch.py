"""Sends a line of a batch to the endpoint's route, without a socket, and writes what came of the lines.

The application has the endpoints and nothing around them: no keys, no log line, no count of HTTP requests. The account of
the batch's owner stands in for the key; its limits hold.

Successful answers go to the output file, all others to the error file, both in the order of the input. Lines are sent on the event loop; files
are written on worker threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

from pydantic_core import from_json, to_json
from starlette.types import ASGIApp, Message, Scope

from server.batches.folder import DataFolder, NewFile
from server.batches.objects import Batch, BatchStatus, FileObject, Purpose
from server.batches.store import COMPLETED, FAILED, TO_RUN, Outcome, PendingLine, entries
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

    @property
    def error_code(self) -> str:
        """Return the code of an error."""
        return str(from_json(self.body)["error"]["code"])


class Dispatcher:
    """Asks an application. Cancelling `ask` ends the request in the engine."""

    def __init__(self, app: ASGIApp, emit: Listener, *, is_background: bool) -> None:
        self._app, self._emit, self._is_background = app, emit, is_background

    async def ask(self, path: str, document: bytes, account: Account | None) -> Reply:
        """POST a JSON document on an account; there always is a reply."""
        state = RequestState(uuid.uuid4().hex, is_background=self._is_background, account=account)
        if account is not None:
            state.owner = account.tenant.name
            CALLER.set(state.owner)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(document)).encode())]
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": None,
            "server": None,
            "state": {},
            STATE: state,
        }
        received = [{"type": "http.request", "body": document, "more_body": False}]
        status, parts = 0, list[bytes]()

        async def receive() -> Message:
            return received.pop() if received else await asyncio.Future()  # the batch does not leave

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.append(bytes(message.get("body", b"")))

        started_s = time.monotonic()
        try:
            await self._app(scope, receive, send)
        except Exception as error:  # any: it ends this line alone
            logger.exception("a request of a batch failed")
            error_answer = to_api_error(error)
            status, parts = error_answer.status, [error_answer.body()]
        finally:
            state.leave()
            if state.record is not None:
                self._emit(RequestEnded(state.record, status, time.monotonic() - started_s, is_batch=True))
        return Reply(status, state.request_id, b"".join(parts), tuple(state.ignored_fields))


WHY_NOT = {
    BatchStatus.CANCELLED: ("batch_cancelled", "The batch was cancelled before this request ran."),
    BatchStatus.EXPIRED: ("batch_expired", "The batch's completion window ended before this request ran."),
}


def answered(line: PendingLine, reply: Reply) -> Outcome:
    """Return the outcome of a line that an endpoint answered."""
    body = from_json(reply.body)
    response = {"status_code": reply.status, "request_id": reply.request_id, "body": body}
    if reply.ignored_fields:
        response["ignored_fields"] = list(reply.ignored_fields)
    is_good = reply.status == 200
    usage = body.get("usage") if is_good and isinstance(body, dict) else None
    return Outcome(line, COMPLETED if is_good else FAILED, _entry(line.custom_id, response, None), usage)


def unanswered(line: PendingLine, code: str, message: str) -> Outcome:
    """Return the outcome of a line that could not be sent."""
    return Outcome(line, FAILED, _entry(line.custom_id, None, (code, message)), None)


def write_files(
    folder: DataFolder, batch: Batch, end: BatchStatus, now: float
) -> tuple[FileObject | None, FileObject | None]:
    """Write the output and the error file of a batch that ends; None for an empty one."""
    why_not = WHY_NOT.get(end)
    good = (entry for _, entry in entries(folder.database, batch.id, COMPLETED))
    bad = (entry for _, entry in entries(folder.database, batch.id, FAILED))
    never = (_entry(name, None, why_not) for name, _ in entries(folder.database, batch.id, TO_RUN))
    output = _write(folder, good, f"{batch.id}_output.jsonl", now)
    try:
        return output, _write(folder, chain(bad, never), f"{batch.id}_error.jsonl", now)
    except Exception:  # such as a full disk: neither file is in the database
        if output is not None:
            folder.path_of(output.id).unlink(missing_ok=True)
        raise


def _write(folder: DataFolder, lines: Iterator[bytes | None], filename: str, now: float) -> FileObject | None:
    file_id = new_file_id()
    file = NewFile(folder.path_of(file_id))
    with file:
        for line in lines:
            assert line is not None, "a line with an outcome has an entry"
            file.write(line + b"\n")
        if not file.num_bytes:
            return None
        file.keep()
    return FileObject(
        id=file_id, bytes=file.num_bytes, created_at=int(now), filename=filename, purpose=Purpose.BATCH_OUTPUT
    )


def _entry(custom_id: str, response: dict[str, Any] | None, error: tuple[str, str] | None) -> bytes:
    return to_json(
        {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": custom_id,
            "response": response,
            "error": None if error is None else {"code": error[0], "message": error[1]},
        }
    )


def new_file_id() -> str:
    return f"file-{uuid.uuid4().hex}"
