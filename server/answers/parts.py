"""What a route may ask for in its signature: parts of the application (`app.state`), or of the model that a request names.

`json_body` finds the model, so a body stands before a model's parts in a signature. Without a body, the query may name one.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import Depends, Request

from engine.handle import EngineHandle
from server.answers.content_guard import Judge
from server.answers.model import ServedModel
from server.answers.models import Entry, Models
from server.answers.respond import Responder
from server.answers.stored_responses import ResponseStore
from server.http.middleware import part, state_of
from server.protocol.errors import STATE, ApiError
from server.settings.app_config import AppConfig
from server.telemetry.live import LiveView
from server.telemetry.metrics import Metrics
from server.telemetry.request_log import RequestLog
from server.tenancy.tenancy import DEFAULT


def _of_model(name: str) -> Any:
    """Return a dependency: the part that answers for the request's model. Raises a 503 unless it is loaded."""

    async def find(request: Request) -> Any:
        entry = _entry(request)
        return getattr(entry.parts or entry.now(), name)

    return Depends(find)


def _entry(request: Request) -> Entry:
    """Return the request's model, which stays until the request ends."""
    state = request.scope[STATE]
    if state.held is None:
        request.app.state.models.find(request.query_params.get("model")).hold(state)
    entry: Entry = state.held
    return entry


async def _config(request: Request) -> AppConfig:
    return _entry(request).config


InModels = Annotated[Models, part("models")]
InModel = Annotated[ServedModel, _of_model("model")]
InResponder = Annotated[Responder, _of_model("responder")]
InEngine = Annotated[EngineHandle, _of_model("engine")]
InConfig = Annotated[AppConfig, Depends(_config)]
InShared = Annotated[AppConfig, part("config")]  # what all models share, which holds none of them
InJudge = Annotated[Judge | None, _of_model("judge")]
InLive = Annotated[LiveView, _of_model("live")]
InAdapterTurn = Annotated[asyncio.Lock, _of_model("adapter_turn")]
InMetrics = Annotated[Metrics, part("metrics")]
InRequestLog = Annotated[RequestLog, part("request_log")]
InResponses = Annotated[ResponseStore, part("responses")]
InInstanceId = Annotated[str, part("instance_id")]  # of this process, for routers


async def _owner(request: Request) -> str:
    return state_of(request.scope).owner


InOwner = Annotated[str, Depends(_owner)]  # the owner of stored things, see server/tenancy/tenancy.py


def check_operator(owner: str, what: str) -> None:
    """Raise a 403 for a tenant of --tenants; `what` is for keys of --api-key."""
    if owner != DEFAULT:
        message = f"{what} takes a key of --api-key; a tenant's key does not allow it."
        raise ApiError(403, "not_allowed", message, type="permission_error")
