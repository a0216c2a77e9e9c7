"""The models: /v1/models and /v1/models/{id}, in OpenAI's and Anthropic's shape at once; load and unload."""

from __future__ import annotations

import math
from datetime import datetime, timezone

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from server.answers.models import Entry, State
from server.answers.parts import InModels, InOwner, check_operator
from server.http.bodies import FREE_BYTES, limited
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
    """A model: OpenAI's four fields, Anthropic's, and vLLM's."""

    id: str = Field(description="The object's name; stored objects are found by it.")
    object: str = Field(description="Which kind of object this is.")
    type: str = Field(description="Always model.")
    display_name: str = Field(description="Its id.")
    created: int = Field(description="When it was made, in seconds since 1970.")
    created_at: datetime = Field(description="The same as a date.")
    owned_by: str = Field(description="Always quire.")
    lifecycle: str = Field(description="Always active.")
    root: str = Field(description="What is served under this name.")
    parent: str | None = Field(description="An adapter's model.")  # of an adapter: its base model
    max_model_len: int | None = Field(description="The longest prompt and answer together; null until it is loaded.")
    max_input_tokens: int | None = Field(description="The same.")
    max_tokens: int | None = Field(description="The same.")
    input_modalities: list[str] = Field(
        description="What prompts may have: text, and image where the model takes images."
    )
    status: ModelStatus = Field(description="Whether it is loaded.")


class ModelList(ResponseBody):
    object: str = Field(description="Which kind of object this is.")
    data: list[ModelCard] = Field(description="The items.")
    has_more: bool = Field(description="Always false: a list has all names.")
    first_id: str = Field(description="The first name.")
    last_id: str = Field(description="The last name.")


router = APIRouter()


def _card(entry: Entry, owner: str, name: str) -> ModelCard:
    """Return the description of a served name, the model's or an adapter's; only the operator sees its path."""
    parts, is_adapter = entry.parts, name not in entry.config.served_model_names
    takes_images = entry.takes_images if parts is None else parts.model.images is not None
    loaded = None if parts is None else parts.engine.adapters.get(name)
    path = name if is_adapter else entry.config.model
    created_s = entry.created_s
    if loaded is not None:
        path, created_s = loaded.path, loaded.loaded_s
    max_model_len = None if parts is None else parts.model.limits.max_model_len
    return ModelCard(
        id=name,
        object="model",
        type="model",
        display_name=name,
        created=created_s,
        created_at=datetime.fromtimestamp(created_s, timezone.utc),
        owned_by="quire",
        lifecycle="active",
        root=path if owner == DEFAULT else name,
        parent=entry.name if is_adapter else None,
        max_model_len=max_model_len,
        max_input_tokens=max_model_len,
        max_tokens=max_model_len,
        input_modalities=["text", "image"] if takes_images else ["text"],
        status=_status(entry),
    )


def _status(entry: Entry) -> ModelStatus:
    state = entry.state
    return ModelStatus(value=state) if state is not State.FAILED else ModelStatus(value=state, reason=entry.reason)


def _json(answer: ResponseBody) -> Response:
    return Response(answer.json_bytes(), media_type="application/json")


@router.get("/v1/models", responses=answers(ModelList))
async def list_models(models: InModels, owner: InOwner) -> Response:
    """List the names that requests may use."""
    cards = [_card(entry, owner, name) for entry in models.entries for name in entry.names]
    first, last = cards[0].id, cards[-1].id
    return _json(ModelList(object="list", data=cards, has_more=False, first_id=first, last_id=last))


@router.get("/v1/models/{name:path}", responses=answers(ModelCard))
async def retrieve_model(models: InModels, owner: InOwner, name: str) -> Response:
    """Return a model, or a 404."""
    return _json(_card(models.find(name), owner, name))


@router.post("/v1/models/{name:path}/load", responses=answers(ModelStatus))
async def load_model(http: Request, models: InModels, owner: InOwner, name: str) -> Response:
    """Load a model now; answers when it is loaded. For the operator's keys."""
    check_operator(owner, "Loading and unloading models")
    entry = models.find(name)
    entry.failed_s = -math.inf  # tries again now
    async for _ in limited(http, FREE_BYTES, "Loading a model takes no body; send none."):
        pass  # what follows it tells that the client has left
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
