"""/v1/batches: a file of requests, run while nobody else needs the engine."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from server.protocol.batches import BatchBody, PageQuery, page
from server.routes.context import InContext, InOwner, json_body

router = APIRouter()


@router.post("/v1/batches")
async def create_batch(
    context: InContext, owner: InOwner, body: Annotated[BatchBody, Depends(json_body(BatchBody))]
) -> dict[str, Any]:
    """Have the requests of a file run."""
    batch = await context.batch_service().create(owner, body, context.config.served_model_names[0])
    return batch.model_dump(mode="json")


@router.get("/v1/batches")
async def list_batches(http: Request, context: InContext, owner: InOwner) -> dict[str, Any]:
    """The account's batches, the newest first."""
    asked = PageQuery.model_validate(dict(http.query_params))
    batches = await context.batch_service().batches(owner, asked.after, asked.limit + 1)
    return page(batches[: asked.limit], has_more=len(batches) > asked.limit)


@router.get("/v1/batches/{batch_id}")
async def retrieve_batch(context: InContext, owner: InOwner, batch_id: str) -> dict[str, Any]:
    """Where a batch stands."""
    return (await context.batch_service().batch(owner, batch_id)).model_dump(mode="json")


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(context: InContext, owner: InOwner, batch_id: str) -> dict[str, Any]:
    """End a batch early."""
    return (await context.batch_service().cancel(owner, batch_id)).model_dump(mode="json")
