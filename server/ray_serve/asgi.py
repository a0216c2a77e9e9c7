"""Carries one HTTP request from the ingress to a replica's application, and its answer back piece by piece.

The first piece is a Head, the others are bytes of the body. Event loop.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from server.http.bodies import limited
from server.http.in_process import Forwarded, Head, Piece
from server.http.threads import unless_disconnected
from server.protocol.errors import ApiError

log = logging.getLogger("quire.ray")

_SERVER = "server_error"
# What needs no memory of earlier requests, which only one replica would have.
POSTED = (
    *("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"),
    *("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/rerank", "/tokenize", "/detokenize"),
)
GOT = ("/v1/models", "/health", "/ready", "/version", "/openapi.json", "/tokenizer_info")
_HOP_BY_HOP = (b"connection", b"content-length", b"transfer-encoding", b"keep-alive", b"te", b"upgrade")


Answer = Callable[[Forwarded], AsyncIterator[Piece]]


class Ingress:
    """An ASGI application that sends requests on, and ends an answer properly if its replica is lost."""

    def __init__(self, answer: Answer, max_body_bytes: int) -> None:
        self._answer, self._max_body_bytes = answer, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or the server's start and end."""
        if scope["type"] == "lifespan":
            for phase in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{phase}.complete"})
            return
        with suppress(ClientDisconnect):
            try:
                request = await self._read(Request(scope, receive))
            except ApiError as error:
                await error.response(scope)(scope, receive, send)
            else:
                await unless_disconnected(receive, self._forward(request, scope, send))

    async def _read(self, request: Request) -> Forwarded:
        method, path, scope = request.method, request.scope["path"], request.scope
        if path not in (POSTED if method == "POST" else GOT):
            raise ApiError(
                404,
                "not_found",
                f"{method} {path} is not served behind Ray, where each request may go to another daemon.",
            )
        too_large = f"The body has more than {self._max_body_bytes} bytes."
        body = b"".join([piece async for piece in limited(request, self._max_body_bytes, too_large)])
        headers = [(name, value) for name, value in scope["headers"] if name not in _HOP_BY_HOP]
        headers.append((b"content-length", str(len(body)).encode()))
        client = scope.get("client")
        return Forwarded(method, path, scope["query_string"], headers, body, client and (client[0], client[1]))

    async def _forward(self, request: Forwarded, scope: Scope, send: Send) -> None:
        head: Head | None = None
        try:
            async for piece in self._answer(request):
                if isinstance(piece, bytes):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    continue
                head = Head(*piece)
                kept = [(name, value) for name, value in head.headers if name not in (b"connection", b"keep-alive")]
                await send({"type": "http.response.start", "status": head.status, "headers": kept})
        except Exception as error:  # any of Ray's, and what the daemon's code raised there
            log.warning("%s %s: the daemon was lost (%s).", request.method, request.path, type(error).__name__)
            await self._end(request, head, scope, send)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _end(self, request: Forwarded, head: Head | None, scope: Scope, send: Send) -> None:
        """Say that the daemon is lost: as an answer, as a last event, or by cutting off what has a length."""
        lost = ApiError(503, "daemon_lost", "The daemon that answered was lost; send the request again.", None, _SERVER)
        if head is None:
            await lost.response(scope)(scope, _nothing, send)
            return
        if dict(head.headers).get(b"content-type", b"").startswith(b"text/event-stream"):
            await send({"type": "http.response.body", "body": _last_events(request.path, lost), "more_body": False})
            return
        raise ConnectionAbortedError("the daemon was lost in the middle of an answer")


def _last_events(path: str, error: ApiError) -> bytes:
    """Return how a stream of this kind ends with an error."""
    if path == "/v1/messages":
        return b"event: error\ndata: " + error.anthropic_body() + b"\n\n"
    event = b"event: error\n" if path == "/v1/responses" else b""
    return event + b"data: " + error.body() + b"\n\n" + (b"" if event else b"data: [DONE]\n\n")


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
