"""Routes for monitoring: /health, /ready, /load, /version, /metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from engine.core.errors import ShuttingDownError
from engine.system.version import VERSION
from server.answers.context import InContext, InOwner, check_operator
from server.protocol.errors import ApiError

router = APIRouter()


@router.get("/health", response_class=PlainTextResponse)
async def health(context: InContext) -> Response:
    """Liveness: the engine thread runs, and makes steps while it has work."""
    health = context.engine.health()
    if not health.alive and not context.client.is_draining:
        message = health.error or "The engine thread is not running."
        raise ApiError(503, "engine_dead", message, type="server_error")
    if health.seconds_since_step > context.config.stall_limit_s:
        message = f"The engine has work but made no step for {health.seconds_since_step:.0f} s."
        raise ApiError(503, "internal_error", message, type="server_error")
    return PlainTextResponse("ok\n")


@router.get("/ready", response_class=PlainTextResponse)
async def ready(context: InContext) -> Response:
    """Readiness: requests are accepted now."""
    await health(context)
    if context.client.is_draining:
        raise ShuttingDownError("The server is shutting down.")
    return PlainTextResponse("ok\n")


@router.get("/load")
async def load(context: InContext) -> dict[str, Any]:
    """Return the number of open requests."""
    return {"server_load": context.client.num_open}


@router.get("/version")
async def version() -> dict[str, Any]:
    """Return the daemon's version."""
    return {"version": VERSION}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(context: InContext, owner: InOwner) -> Response:
    """Return the metrics in Prometheus' format."""
    if context.config.protect_metrics and context.config.api_keys:  # without such keys Prometheus has a tenant's
        check_operator(owner, "Reading the metrics of all tenants")
    content, media_type = context.metrics.render()
    return Response(content, headers={"content-type": media_type})
