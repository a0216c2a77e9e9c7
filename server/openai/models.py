"""The models: /v1/models and /v1/models/{id}, in OpenAI's or Anthropic's shape; load and unload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timezone

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from server.answers.models import Entry, State
from server.answers.parts import InModels, InOwner, check_operator
from server.http.middleware import state_of
from server.http.openapi import answers
from server.http.threads import unless_disconnected
from server.protocol.documents import ResponseBody
from server.protocol.errors import ApiError
from server.tenancy.tenancy import DEFAULT


class ModelStatus(ResponseBody):
    """Whether a model is loaded, in llama-server's shape."""

    value: State = Field(description="loaded, loading, unloaded or failed; requests load an unloaded model.")
    reason: str | None = Field(None, description="Why it failed.")


class ModelCard(ResponseBody):
    """A model: OpenAI's four fields, and vLLM's."""

    id: str = Field(description="The object's name; stored objects are found by it.")
    object: str = Field(description="Which kind of object this is.")
    created: int = Field(description="When it was made, in seconds since 1970.")
    owned_by: str = Field(description="Always quire.")
    root: str = Field(description="What is served under this name.")
    parent: str | None = Field(description="An adapter's model.")  # of an adapter: its base model
    max_model_len: int | None = Field(description="The longest prompt and answer together; null until it is loaded.")
    input_modalities: list[str] = Field(
        description="What prompts may have: text, and image where the model takes images."
    )
    status: ModelStatus = Field(description="Whether it is loaded.")

    def for_anthropic(self) -> ModelInfo:
        """Return the model in Anthropic's shape."""
        created = datetime.fromtimestamp(self.created, timezone.utc)
        return ModelInfo(
            type="model",
            id=self.id,
            display_name=self.id,
            created_at=created.strftime("%Y-%m-%dT%H:%M:%SZ"),
            lifecycle="active",
            max_input_tokens=self.max_model_len or 0,
            max_tokens=self.max_model_len or 0,
        )


class ModelList(ResponseBody):
    object: str = Field(description="Which kind of object this is.")
    data: list[ModelCard] = Field(description="The items.")


class ModelInfo(ResponseBody):
    """A model in Anthropic's shape."""

    type: str
    id: str
    display_name: str
    created_at: str
    lifecycle: str
    max_input_tokens: int
    max_tokens: int


class ModelPage(ResponseBody):
    """A page of Anthropic's list."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


class ModelPageQuery(BaseModel):
    """The query of a page."""

    limit: int = Field(20, ge=1, le=1000)
    after_id: str | None = None
    before_id: str | None = None

    def page(self, cards: Sequence[ModelCard]) -> ModelPage:
        """Return the models after one, or the last before one; unknown ids are ignored."""
        ids = [card.id for card in cards]
        begin = ids.index(self.after_id) + 1 if self.after_id in ids else 0
        end = ids.index(self.before_id) if self.before_id in ids else len(ids)
        rest = cards[begin:end]
        shown = rest[-self.limit :] if self.before_id is not None else rest[: self.limit]
        return ModelPage(
            data=[card.for_anthropic() for card in shown],
            has_more=len(rest) > len(shown),
            first_id=shown[0].id if shown else None,
            last_id=shown[-1].id if shown else None,
        )


router = APIRouter()


def _card(entry: Entry, owner: str, name: str) -> ModelCard:
    """Return the description of a served name, the model's or an adapter's; only the operator sees its path."""
    parts, is_adapter = entry.parts, name not in entry.config.served_model_names
    takes_images = entry.takes_images if parts is None else parts.model.images is not None
    loaded = None if parts is None else parts.engine.adapters.get(name)
    path = name if is_adapter else entry.config.model
    if loaded is not None:
        path = loaded.path
    return ModelCard(
        id=name,
        object="model",
        created=entry.created_s if loaded is None else loaded.loaded_s,
        owned_by="quire",
        root=path if owner == DEFAULT else name,
        parent=entry.name if is_adapter else None,
        max_model_len=None if parts is None else parts.model.limits.max_model_len,
        input_modalities=["text", "image"] if takes_images else ["text"],
        status=_status(entry),
    )


def _status(entry: Entry) -> ModelStatus:
    state = entry.state
    return ModelStatus(value=state) if state is not State.FAILED else ModelStatus(value=state, reason=entry.reason)


def _json(answer: ResponseBody) -> Response:
    return Response(answer.json_bytes(), media_type="application/json")


@router.get("/v1/models", responses=answers(ModelList))
async def list_models(http: Request, models: InModels, owner: InOwner) -> Response:
    """List the names that requests may use."""
    cards = [_card(entry, owner, name) for entry in models.entries for name in entry.names]
    if state_of(http.scope).is_anthropic:
        return _json(ModelPageQuery.model_validate(dict(http.query_params)).page(cards))
    return _json(ModelList(object="list", data=cards))


@router.get("/v1/models/{name:path}", responses=answers(ModelCard))
async def retrieve_model(http: Request, models: InModels, owner: InOwner, name: str) -> Response:
    """Return a model, or a 404."""
    card = _card(models.find(name), owner, name)
    return _json(card.for_anthropic() if state_of(http.scope).is_anthropic else card)


@router.post("/v1/models/{name:path}/load", responses=answers(ModelStatus))
async def load_model(http: Request, models: InModels, owner: InOwner, name: str) -> Response:
    """Load a model now; answers when it is loaded. For the operator's keys."""
    check_operator(owner, "Loading and unloading models")
    entry = models.find(name)
    entry.failed_s = -math.inf  # tries again now
    await http.body()
    await unless_disconnected(http.receive, models.use(entry, asks=False))
    return _json(_status(entry))


@router.post("/v1/models/{name:path}/unload", responses=answers(ModelStatus))
async def unload_model(models: InModels, owner: InOwner, name: str) -> Response:
    """Unload a model once it has no work; requests that come meanwhile load it again. For the operator's keys."""
    check_operator(owner, "Loading and unloading models")
    entry = models.find(name)
    if entry.load is None:
        raise ApiError(400, "invalid_value", f"The model {entry.name!r} cannot be loaded again.", "model")
    await models.unload(entry)
    return _json(_status(entry))
