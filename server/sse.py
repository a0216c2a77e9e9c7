"""Server-sent events: how a JSON document becomes a frame, and a response that holds an answer open.

A token costs one `send` and no task, timer or lock of its own: with 256 streams they were half of what the event loop
did. Event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from server.client import Answer
from server.disconnect import unless_disconnected

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment: clients pass it over, and proxies see that the connection lives
PING_S = 15.0

_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}  # the second stops nginx from holding events back


def frame(document: bytes) -> bytes:
    """One event. JSON has no raw line breaks, so one data line carries it."""
    return b"data: " + document + b"\n\n"


class EventStream(StreamingResponse):
    """Streams frames while its answer's scope is open, so that a client who leaves aborts the request at once."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None], answer: Answer) -> None:
        super().__init__(frames, headers=_HEADERS)
        self._frames = frames
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        """Send until the last frame, or until nobody listens any more."""
        with self._answer, contextlib.suppress(ClientDisconnect):
            await unless_disconnected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pinging = asyncio.ensure_future(_ping(send))
        try:
            async with contextlib.aclosing(self._frames) as frames:
                async for data in frames:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            pinging.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _ping(send: Send) -> None:
    while True:
        await asyncio.sleep(PING_S)
        await send({"type": "http.response.body", "body": PING, "more_body": True})
