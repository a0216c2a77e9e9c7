"""POST /v1/responses, stored responses, and /v1/responses/input_tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Request
from pydantic import AliasChoices, Field, TypeAdapter
from pydantic_core import to_json
from starlette.responses import Response

from engine.core.errors import UnsupportedError
from engine.core.shown import shorten
from server.answers.body import ChatBody
from server.answers.formatter import ChunkMeta
from server.answers.model import aside
from server.answers.parts import InModel, InOwner, InResponder, InResponses
from server.answers.stored_responses import ResponseStore, StoredResponse
from server.http.bodies import INLINE_BYTES, json_body
from server.http.openapi import answers
from server.http.threads import Result, run_slowly
from server.openai.responses.body import InputBody, ResponsesBody
from server.openai.responses.formatter import ResponseDocument, ResponsesFormatter
from server.openai.responses.items import Item
from server.protocol.documents import PageQuery
from server.protocol.errors import ApiError

router = APIRouter()

_ITEMS = TypeAdapter(list[Item])
Body = TypeVar("Body", bound=InputBody)


class ItemsQuery(PageQuery):
    """The query of the items of an input, which are listed with all that is known of them, whatever `include` names."""

    include: str | None = Field(None, validation_alias=AliasChoices("include", "include[]"))
    beta: str | None = None  # of OpenAI's clients
    order: Literal["asc", "desc"] = "desc"


@router.post("/v1/responses", responses=answers(ResponseDocument, streams=True))
async def create_response(
    http: Request,
    body: Annotated[ResponsesBody, Depends(json_body(ResponsesBody, spends=True))],
    model: InModel,
    responder: InResponder,
    responses: InResponses,
    owner: InOwner,
) -> Response:
    """Answer input, or continue an earlier response."""
    named = model.find(body.model)
    if body.store and not responses.is_open:
        raise UnsupportedError("store", "this server stores no responses (--max-stored-responses); leave it out.")
    with body.own_names():
        body = await _with_stored_items(responses, owner, body)
        chat = await _chat(responses, owner, body)
        prepared = await model.prepare(http, chat, named)
        requests = responder.chat_requests(chat, named.adapter, prepared)
        meta = responder.meta(requests, id_prefix="resp", model=named.name)
        make = partial(ResponsesFormatter, body, meta, prepared.params)
        if responses.is_open and body.store is not False:
            make = partial(make, keep=await _keeper(responses, owner, body, meta))
        return await responder.respond(http, chat, requests, prepared.rules, make)


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(
    http: Request,
    body: Annotated[InputBody, Depends(json_body(InputBody))],
    model: InModel,
    responses: InResponses,
    owner: InOwner,
) -> dict[str, Any]:
    """Count the prompt's tokens."""
    named = model.find(body.model)
    with body.own_names():
        body = await _with_stored_items(responses, owner, body)
        chat = await _chat(responses, owner, body)
        ids = await model.prompt_ids(http, chat, named)
    return {"object": "response.input_tokens", "input_tokens": len(ids)}


@router.get("/v1/responses/{response_id}", responses=answers(ResponseDocument))
async def retrieve_response(http: Request, responses: InResponses, owner: InOwner, response_id: str) -> Response:
    """Return a stored response."""
    if http.query_params.get("stream", "false") != "false":
        raise UnsupportedError("stream", "a stored response is whole; leave it out.")
    return Response(responses.find(owner, response_id).document, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(responses: InResponses, owner: InOwner, response_id: str) -> dict[str, Any]:
    """Delete a stored response; its continuations can no longer be continued."""
    responses.delete(owner, response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(http: Request, responses: InResponses, owner: InOwner, response_id: str) -> dict[str, Any]:
    """List a stored response's input, without that of responses before it."""
    asked = ItemsQuery.model_validate(dict(http.query_params))
    stored = responses.find(owner, response_id)
    items = await _unless_small(stored.num_bytes, lambda: json.loads(stored.input_items))
    if asked.order == "desc":
        items.reverse()
    if asked.after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == asked.after]
        if not places:
            message = f"The response has no item {shorten(asked.after)!r}; leave after out."
            raise ApiError(404, "item_not_found", message, "after")
        items = items[places[0] + 1 :]
    return asked.page(items)


async def _chat(responses: ResponseStore, owner: str, body: InputBody) -> ChatBody:
    """Return the chat, with all earlier turns. Raises a 404 if one is gone."""
    previous = body.previous_response_id
    turns = [] if previous is None else responses.chain(owner, previous)

    def make() -> ChatBody:
        return body.to_chat([item for turn in turns for item in _items(turn)])

    return await _unless_small(sum(turn.num_bytes for turn in turns), make)


async def _with_stored_items(responses: ResponseStore, owner: str, body: Body) -> Body:
    """Return the body with stored items in place of references. Raises a 404 if one is gone."""
    wanted = {item.id for item in body.input if item.type == "item_reference" and item.id is not None}
    if not wanted:
        return body
    turns = responses.holding(owner, wanted)

    def resolve() -> Body:
        stored = {item.id: item for turn in reversed(turns) for item in _items(turn)}  # of equal ids the latest
        items = [stored[item.id] if item.type == "item_reference" else item for item in body.input]
        return body.model_copy(update={"input": items})

    return await _unless_small(sum(turn.num_bytes for turn in turns), resolve)


def _items(turn: StoredResponse) -> list[Item]:
    """Return the input of a turn and its output."""
    items: list[Item] = _ITEMS.validate_python(json.loads(turn.input_items))
    return items + _ITEMS.validate_python(json.loads(turn.document)["output"])


async def _unless_small(num_bytes: int, function: Callable[[], Result]) -> Result:
    """Run work on stored bytes, on a worker thread if there are many."""
    return await (run_slowly(function) if num_bytes > INLINE_BYTES else aside(function))


async def _keeper(
    responses: ResponseStore, owner: str, body: ResponsesBody, meta: ChunkMeta
) -> Callable[[bytes, list[str]], None]:
    """Return what stores the answer, once it is whole."""
    inputs = await aside(lambda: [item.document() for item in body.input])
    items = await aside(lambda: to_json(inputs))
    loop = asyncio.get_running_loop()

    def keep(document: bytes, outputs: list[str]) -> None:  # called on another thread for a long answer
        name = f"{meta.id_prefix}_{meta.answer_id}"
        item_ids = frozenset(item["id"] for item in inputs).union(outputs)
        stored = StoredResponse(name, body.previous_response_id, items, document, item_ids)
        loop.call_soon_threadsafe(responses.put, owner, stored)

    return keep
