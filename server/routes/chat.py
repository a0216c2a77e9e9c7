"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from server.protocol.chat import ChatBody, ChatCompletion, ChatForm
from server.protocol.form import Chunks
from server.routes.context import InContext, json_body
from server.routes.conversation import prepare
from server.routes.generate import respond
from server.routes.openapi import answers

router = APIRouter()


@router.post("/v1/chat/completions", responses=answers(ChatCompletion, streams=True))
async def create_chat_completion(
    http: Request, context: InContext, body: Annotated[ChatBody, Depends(json_body(ChatBody))]
) -> Response:
    """Answer a conversation."""
    model = context.check_model(body.model)
    asked = await prepare(context, body)
    form = ChatForm(body, asked.envelope("chatcmpl", model, context), call_id_length=context.limits.call_id_length)
    return await respond(http, context, body, asked.requests, asked.rules, Chunks(form, body.stream_usage))
