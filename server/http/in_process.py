"""Sends a request to an application of this process, without a socket. Event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message, Scope


class Forwarded(NamedTuple):
    """A request that was read."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    client: tuple[str, int] | None


class Head(NamedTuple):
    """How an answer begins."""

    status: int
    headers: list[tuple[bytes, bytes]]


Piece = Head | bytes


async def respond(
    app: ASGIApp, request: Forwarded, more: Mapping[str, Any] | None = None
) -> AsyncGenerator[Piece, None]:
    """Yield an application's answer: a Head, then bytes; closing the generator tells it that the client has left.

    `more` is added to the scope.
    """
    pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
    sent = asyncio.Event()
    left = asyncio.Event()

    async def receive() -> Message:
        if not sent.is_set():
            sent.set()
            return {"type": "http.request", "body": request.body, "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            pieces.put_nowait(Head(message["status"], [(bytes(k), bytes(v)) for k, v in message.get("headers", ())]))
        elif message["type"] == "http.response.body" and message.get("body"):
            pieces.put_nowait(bytes(message["body"]))

    task = asyncio.ensure_future(app({**_scope(request), **(more or {})}, receive, send))
    task.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
        await task  # raises what the application raised
    finally:
        left.set()
        try:
            await asyncio.wait([task], timeout=5)  # it ends by itself
        finally:
            task.cancel()


def _scope(request: Forwarded) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": request.headers,
        "client": request.client,
        "server": None,
        "state": {},
    }
