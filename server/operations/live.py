"""GET /v1/engine/live: the state of the pool and the engine, for the page."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from server.context import InContext, InOwner
from server.tenancy.tenant_file import DEFAULT

router = APIRouter()


@router.get("/v1/engine/live")
async def live(context: InContext, owner: InOwner) -> Response:
    """Return the engine's state; a tenant sees its sequences and the sums of all."""
    document = await context.live.document(None if owner == DEFAULT else owner)
    return Response(document, media_type="application/json", headers={"cache-control": "no-store"})
