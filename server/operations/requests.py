"""GET /v1/requests/{id}: the state of a request, or how it went."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from engine.core.errors import shorten
from server.context import InContext, InOwner
from server.errors import ApiError
from server.telemetry.request_log import RECENT

router = APIRouter()


@router.get("/v1/requests/{name:path}")
async def retrieve_request(context: InContext, owner: InOwner, name: str) -> dict[str, Any]:
    """Return an open request, or one of the last that ended; 404 for any other."""
    record = context.request_log.find(owner, name)
    if record is None:
        message = (
            f"There is no request {shorten(name)!r} among those that are open and the last {RECENT} that ended; "
            "give the x-request-id of an answer's headers, or an answer's id."
        )
        raise ApiError(404, "request_not_found", message, "id")
    if record.generation is None:
        return record.document((), None)
    ids = record.engine_ids
    place = await context.live.place(ids)
    views = await context.live.sequences(ids)
    return record.document(views, place)  # it may have ended in between
