"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from engine.core.types import Pin
from engine.core.types import Request as EngineRequest
from server.protocol.chat import ChatBody
from server.protocol.messages import CountBody, MessagesBody
from server.protocol.messages_form import AnthropicError, AnthropicMessage, MessageForm
from server.routes.context import Context, InContext, aside, json_body
from server.routes.conversation import Asked, count_common, prepare, prompt_ids
from server.routes.generate import respond
from server.routes.openapi import answers

router = APIRouter()

FAILURES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": AnthropicError, "description": "The request cannot be served"},
    "5XX": {"model": AnthropicError, "description": "The server failed, or is about to end"},
}


@router.post("/v1/messages", responses={**answers(AnthropicMessage, streams=True), **FAILURES})
async def create_message(
    http: Request, context: InContext, body: Annotated[MessagesBody, Depends(json_body(MessagesBody))]
) -> Response:
    """Answer a conversation."""
    model = context.check_model(body.model)
    with body.own_names():
        chat = await aside(body.to_chat)
        asked = await prepare(context, chat)
        requests = await _retaining(context, body, chat, asked)
        form = MessageForm(asked.envelope("msg", model, context), call_id_length=context.limits.call_id_length)
        return await respond(http, context, chat, requests, asked.rules, form)


async def _retaining(context: Context, body: MessagesBody, chat: ChatBody, asked: Asked) -> Sequence[EngineRequest]:
    """The requests, with what cache_control asks for."""
    pins = asked.requests[0].pins
    if context.engine.config.pinned_share:
        for seconds, beginning in await aside(lambda: body.retained(chat)):
            whole = len(asked.prompt)
            num = whole if beginning is None else await count_common(context, beginning, asked.text, asked.prompt)
            pins += (Pin(num, seconds),)
    return [replace(request, pins=pins) for request in asked.requests]


@router.post("/v1/messages/count_tokens", responses=FAILURES)
async def count_tokens(context: InContext, body: Annotated[CountBody, Depends(json_body(CountBody))]) -> dict[str, int]:
    """How many tokens the prompt has."""
    context.check_model(body.model)
    with body.own_names():
        _, ids = await prompt_ids(context, await aside(body.to_chat))
    return {"input_tokens": len(ids)}
