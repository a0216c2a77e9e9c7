"""Server-sent events: how a JSON document becomes a frame, and a response that holds an answer open.

sse-starlette does the transport: headers, keep-alive comments, noticing that the client has left.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from sse_starlette.sse import AppStatus, EventSourceResponse
from starlette.types import Receive, Scope, Send

from server.client import Answer

DONE = b"data: [DONE]\n\n"

# Its own drain cuts every stream the moment a signal arrives. Ours lets them finish: the engine ends each one.
AppStatus.enable_automatic_graceful_drain = False


def frame(document: bytes) -> bytes:
    """One event. JSON has no raw line breaks, so one data line carries it."""
    return b"data: " + document + b"\n\n"


class EventStream(EventSourceResponse):
    """Streams frames while its answer's scope is open, so that a client who leaves aborts the request at once."""

    def __init__(self, frames: AsyncIterator[bytes], answer: Answer) -> None:
        super().__init__(frames, sep="\n")
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._answer:
            await super().__call__(scope, receive, send)
