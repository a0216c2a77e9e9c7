"""Server-sent events: a response that sends frames and holds an answer open.

sse-starlette makes the response: its type, its headers, its keep-alive comments. Only its sending loop is ours: there a
token costs one `send` and no task, timer or lock of its own, which with 256 streams were half of what the event loop
did (54 us of CPU an event instead of 76). Event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from server.client import Answer
from server.errors import ApiError
from server.http.disconnect import unless_disconnected

PING = ServerSentEvent(comment="ping", sep="\n").encode()  # clients pass it over; proxies see that the connection lives
NEWS_S = 1.0  # how often a stream that has nothing to send yet looks where it stands


class EventStream(EventSourceResponse):
    """Streams frames while its answer's scope is open, so that a client who leaves aborts the request at once."""

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        answer: Answer,
        *,
        keep_alive_s: float,
        queue_status: Callable[[], Awaitable[str]],
    ) -> None:
        """After `keep_alive_s` of silence comes a comment, never if 0; `queue_status` returns its text."""
        super().__init__(frames, sep="\n")
        del self.headers["connection"]  # it is the server's to say, and where a client asks for an end it says "close"
        self._frames = frames
        self._answer = answer
        self._keep_alive_s = keep_alive_s
        self._queue_status = queue_status
        self._sent_s = 0.0
        self._is_over = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        """Send until the last frame, or until nobody listens any more."""
        with self._answer, contextlib.suppress(ClientDisconnect):
            await unless_disconnected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        commenting = asyncio.ensure_future(self._comment(send)) if self._keep_alive_s else None
        clock = asyncio.get_running_loop().time
        try:
            async with contextlib.aclosing(self._frames) as frames:
                async for data in frames:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    self._sent_s = clock()
        finally:
            self._is_over = True  # before Python 3.12 wait_for may swallow a cancellation
            if commenting is not None:
                commenting.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _comment(self, send: Send) -> None:
        """Comments on a stream that is silent: until it begins where it stands, whenever that changes; later that it lives."""
        clock = asyncio.get_running_loop().time
        self._sent_s = clock()
        told = ""
        while not self._is_over:
            rest_s = self._sent_s + self._keep_alive_s - clock()
            await asyncio.sleep(max(rest_s if self._answer.has_begun else min(NEWS_S, rest_s), 0.0))
            news = "" if self._answer.has_begun else await self._news()
            if news not in ("", told):
                told = news
                comment = ServerSentEvent(comment=news, sep="\n").encode()
            elif clock() - self._sent_s >= self._keep_alive_s:
                comment = PING
            else:
                continue
            self._sent_s = clock()
            await send({"type": "http.response.body", "body": comment, "more_body": True})

    async def _news(self) -> str:
        """Where it stands; nothing if the engine does not say so soon, being in a long step: the stream has to live on."""
        with contextlib.suppress(ApiError, asyncio.TimeoutError):  # not the builtin's before Python 3.11
            return await asyncio.wait_for(self._queue_status(), min(NEWS_S, self._keep_alive_s))
        return ""
