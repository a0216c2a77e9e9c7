"""API keys: who may call. Runs on the event loop, in front of every route but what probes ask and the page's own files.

A key is compared by its digest, in constant time and with every key known, so the time taken tells neither its length
nor how much of it was right.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Sequence
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import ApiError

PROBE_PATHS = frozenset({"/health", "/ready"})


class KeyGuard:
    """ASGI middleware: `Authorization: Bearer KEY`, or `x-api-key: KEY` as Anthropic's clients have it, or 401."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Collection[str]) -> None:
        self._app = app
        self._open_paths = PROBE_PATHS.union(open_paths)
        self._digests = tuple(sha256(key.encode()).digest() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what presents a key, and what needs none."""
        if scope["type"] != "http" or scope["path"] in self._open_paths or self._admits(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "invalid_api_key",
            "The API key is missing or wrong; send the header 'Authorization: Bearer <key>'.",
            type="authentication_error",
            headers={"www-authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)

    def _admits(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        shown = [key if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        digests = [sha256(key.strip().encode("latin-1")).digest() for key in shown]
        matches = [hmac.compare_digest(digest, known) for digest in digests for known in self._digests]
        return any(matches)
