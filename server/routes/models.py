"""GET /v1/models and /v1/models/{id}: the one model that is served, under each of its names, and its adapters.

Clients of Anthropic's, which are told by their header, are answered in its shape.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.adapters import LoadedAdapter
from server.anthropic.errors import is_anthropics
from server.protocol.base import ResponseBody
from server.protocol.models import ModelCard, ModelList, ModelPageQuery
from server.routes.context import Context, InContext
from server.routes.openapi import answers

router = APIRouter()


def _card(context: Context, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        object="model",
        created=context.started_s,
        owned_by="quire",
        root=context.config.model,
        parent=None,
        max_model_len=context.limits.max_model_len,
    )


def _adapter_card(context: Context, loaded: LoadedAdapter) -> ModelCard:
    served = _card(context, context.config.served_model_names[0])
    own = {"id": loaded.adapter.name, "created": loaded.loaded_s, "root": loaded.path, "parent": served.id}
    return served.model_copy(update=own)


def _json(answer: ResponseBody) -> Response:
    return Response(answer.json_bytes(), media_type="application/json")


@router.get("/v1/models", responses=answers(ModelList))
async def list_models(http: Request, context: InContext) -> Response:
    """Every name clients may use."""
    cards = [_card(context, name) for name in context.config.served_model_names]
    cards += [_adapter_card(context, loaded) for loaded in context.engine.adapters.all()]
    if is_anthropics(http.scope):
        return _json(ModelPageQuery.model_validate(dict(http.query_params)).page(cards))
    return _json(ModelList(object="list", data=cards))


@router.get("/v1/models/{name:path}", responses=answers(ModelCard))
async def retrieve_model(http: Request, context: InContext, name: str) -> Response:
    """One of them; 404 for any other."""
    name = context.check_model(name)
    loaded = context.engine.adapters.find(name)
    card = _card(context, name) if loaded is None else _adapter_card(context, loaded)
    return _json(card.for_anthropic() if is_anthropics(http.scope) else card)
