"""Routes for monitoring: /health, /ready, /load, /version, /metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from engine.core.errors import ShuttingDownError
from engine.core.shown import shorten
from engine.system.version import VERSION
from server.answers.models import Entry, Models
from server.answers.parts import InMetrics, InModels, InOwner, InShared, check_operator
from server.protocol.errors import ApiError

router = APIRouter()


def check_health(models: Models, stall_limit_s: float, name: str | None = None) -> None:
    """Raise a 503 if no engine lives, or one has work and makes no step; or of one model, if a name is given.

    So it does until the loads of the start have ended.
    """
    if models.is_starting:
        raise ApiError(503, "model_loading", "The models of the start are being loaded.", type="server_error")
    entries = models.entries if name is None else [_named(models, name)]
    healths = [entry.parts.engine.health() for entry in entries if entry.parts is not None]
    if name is not None and entries[0].error:
        raise ApiError(503, "model_failed", entries[0].error, type="server_error")
    if len(healths) == len(entries) and not (any(health.alive for health in healths) or models.is_draining):
        message = next((health.error for health in healths if health.error), "The engine thread is not running.")
        raise ApiError(503, "engine_dead", message, type="server_error")
    stalled_s = max((health.seconds_since_step for health in healths), default=0.0)
    if stalled_s > stall_limit_s:
        message = f"The engine has work but made no step for {stalled_s:.0f} s."
        raise ApiError(503, "internal_error", message, type="server_error")


def _named(models: Models, name: str) -> Entry:
    """Return a model. Raises a 404, which names no other: probes need no key and no allowed host."""
    try:
        return models.find(name)
    except ApiError as error:
        error.message = f"The model {shorten(name)!r} is not served here."
        raise


@router.get("/health", response_class=PlainTextResponse)
async def health(models: InModels, config: InShared, model: str | None = None) -> Response:
    """Liveness: an engine lives and makes steps while it has work; of `model`, its state."""
    check_health(models, config.stall_limit_s, model)
    return PlainTextResponse("ok\n" if model is None else f"{models.find(model).state.value}\n")


@router.get("/ready", response_class=PlainTextResponse)
async def ready(models: InModels, config: InShared, model: str | None = None) -> Response:
    """Readiness: requests are accepted now."""
    check_health(models, config.stall_limit_s, model)
    if models.is_draining:
        raise ShuttingDownError("The server is shutting down.")
    return PlainTextResponse("ok\n")


@router.get("/load")
async def load(models: InModels) -> dict[str, Any]:
    """Return the number of open requests."""
    return {"server_load": models.num_open}


@router.get("/version")
async def version() -> dict[str, Any]:
    """Return the daemon's version."""
    return {"version": VERSION}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(metrics: InMetrics, config: InShared, owner: InOwner) -> Response:
    """Return the metrics in Prometheus' format."""
    if config.protect_metrics and config.api_keys:  # without such keys Prometheus has a tenant's
        check_operator(owner, "Reading the metrics of all tenants")
    content, media_type = metrics.render()
    return Response(content, headers={"content-type": media_type})
