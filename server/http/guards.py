"""Guards of the application: against foreign web pages, by Host and Origin, and against callers without a key. Event loop.

A browser on this machine lets any web page send requests to the daemon. Two things keep such a page out:

- Host. With DNS rebinding a page makes its own name resolve to this machine, and then reads the answers as its own. So
  without a key only IP addresses, which DNS cannot point elsewhere, loopback names and --allowed-hosts are answered.
  With a key any name is: the page does not have the key. Probes are exempt: load balancers call by name, and learn
  only a status.
- Origin. A page may send a form or an upload to any address, it only cannot read the answer. So a request that changes
  something, and a preflight, is refused if the browser says that another origin sent it, unless --allowed-origins
  names that origin. Programs send neither Origin nor Sec-Fetch-Site and are let through.

Without a key, only the probes, the page's files and, unless --protect-metrics is set, the monitoring paths are served. A
key is compared by its digest, in constant time and with every known key (server/tenancy/tenancy.py), so the time taken
reveals nothing of it.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.core.shown import shorten
from server.http.middleware import state_of
from server.protocol.errors import ApiError
from server.settings.origins import NO_ORIGIN, Authority, is_loopback_name, is_same_origin, names_host, names_origin
from server.tenancy.tenancy import Tenancy

_READING = frozenset({"GET", "OPTIONS"})  # a HEAD is a GET here
_FOREIGN_SITES = frozenset({"cross-site", "same-site"})  # another port of this machine is the same site


class CrossSiteGuard:
    """ASGI middleware: a 403 for hosts and origins that are not allowed."""

    def __init__(self, app: ASGIApp, allowed_hosts: Collection[str] | None, allowed_origins: Collection[str]) -> None:
        """If `allowed_hosts` is None, every host is allowed."""
        self._app = app
        self._hosts = allowed_hosts
        self._origins = frozenset(allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on an allowed request, or refuse it without reading its body."""
        error = self._fault(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error.response(scope)(scope, receive, send)

    def _fault(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if self._hosts is not None and scope["path"] not in PROBE_PATHS:
            error = _host_fault(hosts, self._hosts)
            if error is not None:
                return error
        is_preflight = scope["method"] == "OPTIONS" and "access-control-request-method" in headers
        if scope["method"] in _READING and not is_preflight:
            return None
        return self._origin_fault(headers, hosts)

    def _origin_fault(self, headers: Headers, hosts: list[str]) -> ApiError | None:
        """Return the error for a foreign origin; a proxy may have changed Host."""
        sites, origins = headers.getlist("sec-fetch-site"), headers.getlist("origin")
        if sites == ["same-origin"]:
            return None
        if not origins and not _FOREIGN_SITES.isdisjoint(sites):
            origins = [NO_ORIGIN]
        for origin in origins:
            is_own = len(hosts) == 1 and is_same_origin(origin, hosts[0])
            if not is_own and not names_origin(self._origins, origin):
                shown = shorten(origin)
                message = (
                    f"A page of the origin {shown!r} may not send this: Quire refuses what pages of other origins send. "
                    f"To allow it, start Quire with --allowed-origins {shown}."
                )
                return ApiError(403, "origin_not_allowed", message, type="permission_error")
        return None


def _host_fault(hosts: list[str], allowed: Collection[str]) -> ApiError | None:
    """Return the error for a Host that is not allowed; browsers always send one."""
    if len(hosts) > 1:
        return ApiError(400, "invalid_host", "The request has several Host headers; send one.")
    if not hosts or not hosts[0]:
        return None
    authority = Authority.parse(hosts[0])
    if authority is None:
        return ApiError(400, "invalid_host", f"The Host header {shorten(hosts[0])!r} is not a host and a port.")
    if authority.is_address or is_loopback_name(authority.host) or names_host(allowed, authority.host):
        return None
    name = shorten(authority.host)
    message = (
        f"The host name {name!r} is not allowed: without a key, Quire answers to IP addresses, to localhost and to the "
        f"names in --allowed-hosts. To allow it, start Quire with --allowed-hosts {name}, or with --api-key."
    )
    return ApiError(403, "host_not_allowed", message, type="permission_error")


class Cors(CORSMiddleware):
    """Starlette's CORS with --allowed-origins; the guard refuses other origins."""

    def is_allowed_origin(self, origin: str) -> bool:
        """Return whether pages of an origin may read answers."""
        return names_origin(self.allow_origins, origin)


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
