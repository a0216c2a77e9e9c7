"""What is Anthropic's own in HTTP, for the paths of its API: how errors look, and the header that has a request's id.

ASGI, outermost, on the event loop. All others, the guard and the limits too, speak as OpenAI does; what they say is said
anew here.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import to_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PATH = "/v1/messages"
SHARED_PATH = "/v1/models"  # both APIs have it; Anthropic's clients say with every request which version they speak
VERSION_HEADER = "anthropic-version"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_document(status: int, message: str, **more: Any) -> bytes:
    """An error as JSON."""
    kind = _TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    return to_json({"type": "error", "error": {"type": kind, "message": message}, **more})


def is_anthropics(scope: Scope) -> bool:
    """Whether an HTTP request is one of Anthropic's API."""
    path = f"{scope['path']}/"
    return path.startswith(f"{PATH}/") or (
        path.startswith(f"{SHARED_PATH}/") and VERSION_HEADER in Headers(scope=scope)
    )


class AnthropicErrorMiddleware:
    """ASGI middleware: translates what is said of requests to that API."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on; an error is held until its body is there."""
        if scope["type"] != "http" or not is_anthropics(scope):
            await self._app(scope, receive, send)
            return
        held: Message | None = None

        async def send_translated(message: Message) -> None:
            nonlocal held
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["request-id"] = headers.get("x-request-id", "")
                if message["status"] >= 400 and headers.get("content-type") == "application/json":
                    held = message
                    return
            elif held is not None:
                message = {**message, "body": _translated(held, message.get("body", b""))}
                await send(held)
                held = None
            await send(message)

        await self._app(scope, receive, send_translated)


def _translated(start: Message, body: bytes) -> bytes:
    """The error anew. Errors come in one piece (server/errors.py)."""
    headers = MutableHeaders(scope=start)
    message = json.loads(body)["error"]["message"]
    document = error_document(start["status"], message, request_id=headers["request-id"])
    headers["content-length"] = str(len(document))
    return document
