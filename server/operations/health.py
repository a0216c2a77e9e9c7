"""Routes for monitoring: /health, /ready, /load, /version, /metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from engine.core.errors import EngineDeadError, ServerError, ShuttingDownError
from engine.version import VERSION
from server.context import Context, InContext
from server.errors import to_api_error

router = APIRouter()


def _check_alive(context: Context) -> None:
    health = context.engine.health()
    if not health.alive and not context.client.is_draining:
        raise EngineDeadError(health.error or "The engine thread is not running.")
    if health.seconds_since_step > context.config.stall_limit_s:
        raise ServerError(f"The engine has work but made no step for {health.seconds_since_step:.0f} s.")


def _status(http: Request, context: Context, *, ready: bool) -> Response:
    try:
        _check_alive(context)
        if ready and context.client.is_draining:
            raise ShuttingDownError("The server is shutting down.")
    except ServerError as error:
        answer = to_api_error(error)
        answer.status = 503
        return answer.response(http.scope)
    return Response(status_code=200)


@router.get("/health", response_class=Response)
async def health(http: Request, context: InContext) -> Response:
    """Liveness: the engine thread runs, and makes steps while it has work."""
    return _status(http, context, ready=False)


@router.get("/ready", response_class=Response)
async def ready(http: Request, context: InContext) -> Response:
    """Readiness: requests are accepted now."""
    return _status(http, context, ready=True)


@router.get("/load")
async def load(context: InContext) -> dict[str, Any]:
    """Return the number of open requests."""
    return {"server_load": context.client.num_open}


@router.get("/version")
async def version() -> dict[str, Any]:
    return {"version": VERSION}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(context: InContext) -> Response:
    """Return the metrics in Prometheus' format."""
    content, media_type = context.metrics.render()
    return Response(content, headers={"content-type": media_type})
