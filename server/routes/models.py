"""GET /v1/models and /v1/models/{id}: the one model that is served, under each of its names."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from server.routes.context import Context, InContext

router = APIRouter()


def _card(context: Context, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.started_s,
        "owned_by": "quire",
        "root": context.config.model,
        "parent": None,
        "max_model_len": context.limits.max_model_len,
    }


@router.get("/v1/models")
async def list_models(context: InContext) -> dict[str, Any]:
    """Every name clients may use."""
    return {"object": "list", "data": [_card(context, name) for name in context.config.served_model_names]}


@router.get("/v1/models/{name:path}")
async def retrieve_model(context: InContext, name: str) -> dict[str, Any]:
    """One of them; 404 for any other."""
    return _card(context, context.check_model(name))
