"""GET /v1/models and /v1/models/{id}: the one model that is served, under each of its names."""

from __future__ import annotations

from fastapi import APIRouter

from server.protocol.base import ResponseBody
from server.routes.context import Context, InContext

router = APIRouter()


class ModelCard(ResponseBody):
    """OpenAI's four fields, and vLLM's."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "quire"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(ResponseBody):
    object: str = "list"
    data: list[ModelCard]


def _card(context: Context, name: str) -> ModelCard:
    return ModelCard(
        id=name, created=context.started_s, root=context.config.model, max_model_len=context.limits.max_model_len
    )


@router.get("/v1/models")
async def list_models(context: InContext) -> ModelList:
    """Every name clients may use."""
    return ModelList(data=[_card(context, name) for name in context.config.served_model_names])


@router.get("/v1/models/{name:path}")
async def retrieve_model(context: InContext, name: str) -> ModelCard:
    """One of them; 404 for any other."""
    return _card(context, context.check_model(name))
