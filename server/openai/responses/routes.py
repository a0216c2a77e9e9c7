"""POST /v1/responses, stored responses, and /v1/responses/input_tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field, TypeAdapter
from pydantic_core import to_json
from starlette.responses import Response

from engine.core.errors import UnsupportedError, shorten
from engine.core.types import SamplingParams
from server.answers.context import Context, InContext, InOwner, Result, aside, json_body
from server.answers.formatter import ChunkMeta
from server.answers.respond import chunk_meta, respond
from server.answers.stored_responses import StoredResponse
from server.http.bodies import INLINE_BYTES
from server.http.openapi import answers
from server.http.threads import run_slowly
from server.openai.chat import ChatBody, prepare, prompt_ids
from server.openai.responses.body import InputBody, ResponsesBody
from server.openai.responses.formatter import ResponsesFormatter
from server.openai.responses.items import Item
from server.openai.responses.output import ResponseDocument
from server.protocol.errors import ApiError

router = APIRouter()

_ITEMS = TypeAdapter(list[Item])
Body = TypeVar("Body", bound=InputBody)


class Page(BaseModel):
    """The query of a page of a list."""

    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


@router.post("/v1/responses", responses=answers(ResponseDocument, streams=True))
async def create_response(
    http: Request,
    context: InContext,
    owner: InOwner,
    body: Annotated[ResponsesBody, Depends(json_body(ResponsesBody, spends=True))],
) -> Response:
    """Answer input, or continue an earlier response."""
    model = context.check_model(body.model)
    if body.store and not context.responses.is_open:
        raise UnsupportedError("store", "this server stores no responses (--max-stored-responses); leave it out.")
    with body.own_names():
        body = await _with_stored_items(context, owner, body)
        chat = await _chat(context, owner, body)
        prepared, requests = await prepare(context, chat)
        meta = chunk_meta(context, requests, id_prefix="resp", model=model)
        formatter = await _formatter(context, owner, body, prepared.params, meta)
        return await respond(http, context, chat, requests, prepared.rules, formatter)


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(
    context: InContext, owner: InOwner, body: Annotated[InputBody, Depends(json_body(InputBody))]
) -> dict[str, Any]:
    """Count the prompt's tokens."""
    context.check_model(body.model)
    with body.own_names():
        body = await _with_stored_items(context, owner, body)
        ids = await prompt_ids(context, await _chat(context, owner, body))
    return {"object": "response.input_tokens", "input_tokens": len(ids)}


@router.get("/v1/responses/{response_id}", responses=answers(ResponseDocument))
async def retrieve_response(http: Request, context: InContext, owner: InOwner, response_id: str) -> Response:
    """Return a stored response."""
    if http.query_params.get("stream", "false") != "false":
        raise UnsupportedError("stream", "a stored response is whole; leave it out.")
    return Response(context.responses.find(owner, response_id).document, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(context: InContext, owner: InOwner, response_id: str) -> dict[str, Any]:
    """Delete a stored response; its continuations can no longer be continued."""
    context.responses.delete(owner, response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(http: Request, context: InContext, owner: InOwner, response_id: str) -> dict[str, Any]:
    """List a stored response's input, without that of responses before it."""
    page = Page.model_validate(dict(http.query_params))
    stored = context.responses.find(owner, response_id)
    items = await _unless_small(stored.num_bytes, lambda: json.loads(stored.input_items))
    if page.order == "desc":
        items.reverse()
    if page.after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == page.after]
        if not places:
            message = f"The response has no item {shorten(page.after)!r}; leave after out."
            raise ApiError(404, "item_not_found", message, "after")
        items = items[places[0] + 1 :]
    shown = items[: page.limit]
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return {"object": "list", "data": shown, "first_id": first, "last_id": last, "has_more": len(items) > page.limit}


async def _chat(context: Context, owner: str, body: InputBody) -> ChatBody:
    """Return the chat, with all earlier turns. Raises a 404 if one is gone."""
    previous = body.previous_response_id
    turns = [] if previous is None else context.responses.chain(owner, previous)

    def make() -> ChatBody:
        return body.to_chat([item for turn in turns for item in _items(turn)])

    return await _unless_small(sum(turn.num_bytes for turn in turns), make)


async def _with_stored_items(context: Context, owner: str, body: Body) -> Body:
    """Return the body with stored items in place of references. Raises a 404 if one is gone."""
    wanted = {item.id for item in body.input if item.type == "item_reference" and item.id is not None}
    if not wanted:
        return body
    turns = context.responses.holding(owner, wanted)

    def resolve() -> Body:
        stored = {item.id: item for turn in turns for item in _items(turn)}
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


async def _formatter(
    context: Context, owner: str, body: ResponsesBody, params: SamplingParams, meta: ChunkMeta
) -> ResponsesFormatter:
    length = context.limits.call_id_length
    if not context.responses.is_open or body.store is False:
        return await aside(lambda: ResponsesFormatter(body, meta, params, call_id_length=length))
    inputs = await aside(lambda: [item.document() for item in body.input])
    items = await aside(lambda: to_json(inputs))
    loop = asyncio.get_running_loop()

    def keep(document: bytes, outputs: list[str]) -> None:  # called on another thread for a long answer
        name = f"{meta.id_prefix}_{meta.answer_id}"
        item_ids = frozenset(item["id"] for item in inputs).union(outputs)
        stored = StoredResponse(name, body.previous_response_id, items, document, item_ids)
        loop.call_soon_threadsafe(context.responses.put, owner, stored)

    return await aside(lambda: ResponsesFormatter(body, meta, params, call_id_length=length, keep=keep))
