"""Turns exceptions into HTTP answers, in OpenAI's or Anthropic's envelope.

    {"error": {"message": ..., "type": ..., "param": ... | null, "code": ...}}
    {"type": "error", "error": {"type": ..., "message": ...}, "request_id": ...}

Runs on the event loop. Codes are strings that a program may rely on; messages are for people.
"""

from __future__ import annotations

import errno
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus

from fastapi import FastAPI, Request
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Scope

from engine.core.errors import (
    AdapterConflictError,
    AdapterNotFoundError,
    ClientError,
    ComputeError,
    ContextLengthError,
    DeadlineError,
    EngineDeadError,
    InvalidRequestError,
    NeverFitsError,
    OverloadedError,
    QuireError,
    ShuttingDownError,
    UnsupportedError,
)
from engine.core.shown import printable, shorten
from engine.system.similar import closest
from engine.text.fields.body import describe

STATE = "quire"  # the key of a request's RequestState (server/http/middleware.py) in its ASGI scope

_MAX_LOGGED_CHARS = 400  # of a sentence
_MAX_SUGGESTED_CHARS = 100  # of a path for which a served one is suggested
_RETRY_SOON = {"retry-after": "1", "retry-after-ms": "1000"}
_INVALID, _SERVER = "invalid_request_error", "server_error"

# The first class that fits decides: (exception, status, type, code).
_TABLE: tuple[tuple[type[Exception], int, str, str], ...] = (
    (ContextLengthError, 400, _INVALID, "context_length_exceeded"),
    (NeverFitsError, 400, _INVALID, "request_too_large"),
    (UnsupportedError, 400, _INVALID, "unsupported_parameter"),
    (InvalidRequestError, 400, _INVALID, "invalid_value"),
    (AdapterNotFoundError, 404, _INVALID, "adapter_not_found"),
    (AdapterConflictError, 409, _INVALID, "adapter_conflict"),
    (DeadlineError, 408, "timeout_error", "deadline_unreachable"),
    (OverloadedError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (ShuttingDownError, 503, "service_unavailable_error", "shutting_down"),
    (EngineDeadError, 503, _SERVER, "engine_dead"),
    (ComputeError, 500, _SERVER, "compute_error"),
    (QuireError, 500, _SERVER, "internal_error"),
    (ClientDisconnect, 499, _INVALID, "client_disconnected"),
)

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

# A refused field -> the code by which Anthropic's SDKs know that they have to do without it.
_ANTHROPIC_CODES = {"thread": "thread_unsupported_request"}

# OpenAI's codes for pydantic's error types.
_VALIDATION_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "json_invalid": "invalid_json",
    "unsupported_parameter": "unsupported_parameter",
}


@dataclass(eq=False)  # not frozen: an exception's traceback is set while it travels
class ApiError(Exception):
    """An answer that is an error, ready to be sent."""

    status: int
    code: str
    message: str
    param: str | None = None
    type: str = _INVALID
    headers: dict[str, str] = field(default_factory=dict)
    log_message: str = ""  # for the log, where `message` may quote the prompt

    @property
    def logged(self) -> str:
        """Return the sentence for the log and the list of requests: bounded, and without the prompt."""
        sentence = printable(self.log_message or self.message)
        return sentence if len(sentence) <= _MAX_LOGGED_CHARS else sentence[:_MAX_LOGGED_CHARS] + "..."

    def body(self) -> bytes:
        """Return OpenAI's envelope as JSON."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return to_json({"error": error})

    def anthropic_body(self, **more: str) -> bytes:
        """Return Anthropic's envelope as JSON."""
        kind = _ANTHROPIC_TYPES.get(self.status) or ("api_error" if self.status >= 500 else _INVALID)
        code = _ANTHROPIC_CODES.get(self.param or "")
        details = {} if code is None else {"details": {"error_code": code}}
        return to_json({"type": "error", "error": {"type": kind, "message": self.message, **details}, **more})

    def response(self, scope: Scope) -> Response:
        """Return the answer to a request; a 503 always says when to try again."""
        headers = _RETRY_SOON | self.headers if self.status == HTTPStatus.SERVICE_UNAVAILABLE else self.headers
        state = scope.get(STATE)
        if state is None:
            return Response(self.body(), self.status, headers, media_type="application/json")
        state.error = replace(self)  # without a traceback, whose frames hold the body
        body = self.anthropic_body(request_id=state.request_id) if state.is_anthropic else self.body()
        return Response(body, self.status, headers, media_type="application/json")


def is_disk_full(error: Exception) -> bool:
    """Return whether a write of a file or of SQLite failed on a full disk."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    sqlite3 = sys.modules.get("sqlite3")  # a daemon with batches has imported it
    is_of_database = sqlite3 is not None and isinstance(error, sqlite3.Error)
    return is_of_database and "disk is full" in str(error)  # its code has no name before Python 3.11


def to_api_error(error: Exception) -> ApiError:
    """Return the answer for an exception; unforeseen ones get a bare 500."""
    if isinstance(error, ApiError):
        return error
    if is_disk_full(error):
        message = "The server's disk is full; delete files, or try again later."
        return ApiError(507, "insufficient_storage", message, None, _SERVER)
    if isinstance(error, ValidationError):
        return _from_validation(error)
    if isinstance(error, HTTPException):
        return _from_http(error)
    for kind, status, error_type, code in _TABLE:
        if isinstance(error, kind):
            param, log_message = (error.param, error.log_message) if isinstance(error, ClientError) else (None, "")
            message = str(error) or "The client left before its answer."
            return ApiError(status, code, message, param, error_type, _retry_headers(error), log_message)
    return ApiError(500, "internal_error", "The server failed on this request; its log says why.", None, _SERVER)


def _retry_headers(error: Exception) -> dict[str, str]:
    if isinstance(error, DeadlineError):
        return {"x-should-retry": "false"}  # OpenAI's clients retry a 408, which would be later than the client wants
    if not isinstance(error, OverloadedError | ShuttingDownError):
        return {}
    wait_s = max(error.retry_after_s, 0.001)
    return {"retry-after": str(math.ceil(wait_s)), "retry-after-ms": str(math.ceil(wait_s * 1000))}


def _from_validation(error: ValidationError) -> ApiError:
    message, param = describe(error)
    kind = error.errors(include_url=False, include_context=False, include_input=False)[0]["type"]
    code = _VALIDATION_CODES.get(kind) or ("invalid_type" if kind.endswith("_type") else "invalid_value")
    return ApiError(400, code, message, param)


def _from_http(error: HTTPException) -> ApiError:
    """Return the answer for an error of Starlette: no such route, no such method."""
    phrase = HTTPStatus(error.status_code).phrase
    error_type = _INVALID if error.status_code < 500 else _SERVER
    code = phrase.lower().replace(" ", "_")
    return ApiError(error.status_code, code, str(error.detail), None, error_type, dict(error.headers or {}))


def _close_path(given: str, paths: Sequence[str]) -> str:
    """Return the served path that a misspelt one was meant to be, or ""."""
    if (versioned := f"/v1{given.rstrip('/')}") in paths:
        return versioned  # the client's base URL lacks it
    if len(given) > _MAX_SUGGESTED_CHARS or given.count("/") < 2:
        return ""  # one short word resembles many
    ends = [path for path in paths if path.endswith(given) or (given.endswith(path) and path.count("/") > 1)]
    return max(ends, key=len, default="") or closest(given, paths)


async def _answer(paths: Callable[[], Iterable[str]], request: Request, error: Exception) -> Response:
    api_error = to_api_error(error)
    if isinstance(error, HTTPException):
        path = shorten(request.url.path)
        if error.status_code == HTTPStatus.NOT_FOUND:
            close = _close_path(request.url.path, [path for path in paths() if "{" not in path])
            hint = f"; did you mean {close}?" if close else ". docs/reference/api.md lists the routes."
            api_error.message = f"There is no route {request.method} {path} here{hint}"
        elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            api_error.message = f"{request.method} is not allowed on {path}; use {api_error.headers['Allow']}."
    return api_error.response(request.scope)


def install(app: FastAPI, paths: Callable[[], Iterable[str]]) -> None:
    """Register the answers to known exceptions; `paths` has the served ones, of which a 404 names the nearest.

    The outermost middleware logs and answers the others.
    """
    for kind in (ApiError, QuireError, ValidationError, HTTPException, ClientDisconnect):
        app.add_exception_handler(kind, partial(_answer, paths))
