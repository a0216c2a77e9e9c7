"""Routes for monitoring: /health, /ready, /load, /version, /metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from engine.core.errors import ShuttingDownError
from engine.system.version import VERSION
from server.answers.client import EngineClient
from server.answers.parts import InClient, InConfig, InMetrics, InOwner, check_operator
from server.protocol.errors import ApiError

router = APIRouter()


def check_health(client: EngineClient, stall_limit_s: float) -> None:
    """Raise a 503 if the engine thread does not run, or has work and makes no step."""
    health = client.engine.health()
    if not health.alive and not client.is_draining:
        message = health.error or "The engine thread is not running."
        raise ApiError(503, "engine_dead", message, type="server_error")
    if health.seconds_since_step > stall_limit_s:
        message = f"The engine has work but made no step for {health.seconds_since_step:.0f} s."
        raise ApiError(503, "internal_error", message, type="server_error")


@router.get("/health", response_class=PlainTextResponse)
async def health(client: InClient, config: InConfig) -> Response:
    """Liveness: the engine thread runs, and makes steps while it has work."""
    check_health(client, config.stall_limit_s)
    return PlainTextResponse("ok\n")


@router.get("/ready", response_class=PlainTextResponse)
async def ready(client: InClient, config: InConfig) -> Response:
    """Readiness: requests are accepted now."""
    check_health(client, config.stall_limit_s)
    if client.is_draining:
        raise ShuttingDownError("The server is shutting down.")
    return PlainTextResponse("ok\n")


@router.get("/load")
async def load(client: InClient) -> dict[str, Any]:
    """Return the number of open requests."""
    return {"server_load": client.num_open}


@router.get("/version")
async def version() -> dict[str, Any]:
    """Return the daemon's version."""
    return {"version": VERSION}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(metrics: InMetrics, config: InConfig, owner: InOwner) -> Response:
    """Return the metrics in Prometheus' format."""
    if config.protect_metrics and config.api_keys:  # without such keys Prometheus has a tenant's
        check_operator(owner, "Reading the metrics of all tenants")
    content, media_type = metrics.render()
    return Response(content, headers={"content-type": media_type})
