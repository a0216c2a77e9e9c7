"""API keys: which clients may call, and on which account. Event loop.

Without a key, only the probes, the page's files and, unless --protect-metrics is set, the monitoring paths are served.

A key is compared by its digest, in constant time and with every known key (server/tenancy/tenancy.py), so the time taken
reveals nothing of it.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.middleware import state_of
from server.protocol.errors import ApiError
from server.tenancy.tenancy import Tenancy

PROBE_PATHS = frozenset({"/health", "/ready"})
MONITORING_PATHS = frozenset({"/metrics", "/version"})  # numbers, and names of models, adapters and tenants


class KeyGuard:
    """ASGI middleware: `Authorization: Bearer KEY`, or `x-api-key: KEY`, or a 401."""

    def __init__(self, app: ASGIApp, tenancy: Tenancy, open_paths: Collection[str]) -> None:
        self._app = app
        self._open_paths = frozenset(open_paths)
        self._tenancy = tenancy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on requests with a key, and those that need none."""
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        account = None if (error := _twice(headers)) else self._tenancy.find(_shown(headers))
        if account is not None:
            if self._tenancy.has_file:
                state = state_of(scope)
                state.account, state.owner = account, account.tenant.name
            await self._app(scope, receive, send)
            return
        error = error or ApiError(
            401,
            "invalid_api_key",
            "The API key is missing or wrong; send the header 'Authorization: Bearer <key>'.",
            type="authentication_error",
            headers={"www-authenticate": "Bearer"},
        )
        await error.response(scope)(scope, receive, send)


def _twice(headers: Headers) -> ApiError | None:
    """Return the error for a repeated key header: proxies differ in which one counts."""
    for name in ("Authorization", "x-api-key"):
        if len(headers.getlist(name)) > 1:
            return ApiError(400, "invalid_header", f"The request has several {name} headers; send one.")
    return None


def _shown(headers: Headers) -> list[str]:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return [(key if scheme.lower() == "bearer" else "").strip(), headers.get("x-api-key", "").strip()]
