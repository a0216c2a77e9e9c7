"""What a route may ask for in its signature: the parts of the application, which create_app puts into `app.state`."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Depends, Request

from engine.handle import EngineHandle
from server.answers.client import EngineClient
from server.answers.model import ServedModel
from server.answers.respond import Responder
from server.answers.stored_responses import ResponseStore
from server.batches.worker import BatchService
from server.http.middleware import part, state_of
from server.protocol.errors import ApiError
from server.settings.app_config import AppConfig
from server.telemetry.live import LiveView
from server.telemetry.metrics import Metrics
from server.telemetry.request_log import RequestLog
from server.tenancy.tenancy import DEFAULT

InModel = Annotated[ServedModel, part("model")]
InResponder = Annotated[Responder, part("responder")]
InEngine = Annotated[EngineHandle, part("engine")]
InClient = Annotated[EngineClient, part("client")]
InConfig = Annotated[AppConfig, part("config")]
InLive = Annotated[LiveView, part("live")]
InMetrics = Annotated[Metrics, part("metrics")]
InRequestLog = Annotated[RequestLog, part("request_log")]
InResponses = Annotated[ResponseStore, part("responses")]
InAdapterTurn = Annotated[asyncio.Lock, part("adapter_turn")]  # adapters are read one at a time
InInstanceId = Annotated[str, part("instance_id")]  # of this process, for routers


async def _batches(request: Request) -> BatchService:
    batches: BatchService | None = request.app.state.batches
    if batches is None:
        message = "Files and batches need a folder on disk; start the server with --data-dir FOLDER."
        raise ApiError(501, "not_enabled", message, type="not_implemented_error")
    return batches


InBatches = Annotated[BatchService, Depends(_batches)]


async def _owner(request: Request) -> str:
    return state_of(request.scope).owner


InOwner = Annotated[str, Depends(_owner)]  # the owner of stored things, see server/tenancy/tenancy.py


def check_operator(owner: str, what: str) -> None:
    """Raise a 403 for a tenant of --tenants; `what` is for keys of --api-key."""
    if owner != DEFAULT:
        message = f"{what} takes a key of --api-key; a tenant's key does not allow it."
        raise ApiError(403, "not_allowed", message, type="permission_error")
