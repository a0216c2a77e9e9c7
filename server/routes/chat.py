"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from server.protocol.chat import ChatBody, ChatForm
from server.protocol.form import Envelope
from server.routes.context import InContext, json_body
from server.routes.generate import answer_id, constrain, engine_requests, respond

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(
    http: Request, context: InContext, body: Annotated[ChatBody, Depends(json_body(ChatBody))]
) -> Response:
    """Answer a conversation."""
    model = context.check_model(body.model)
    text = body.render(context.limits)
    [ids] = await context.encode([text], "messages", add_special_tokens=body.add_special_tokens)
    prompt = body.truncate(ids, context.limits)
    params = body.params(context.limits, len(prompt))
    params = await constrain(context, body.message_grammar(context.limits), params)
    params = body.with_thoughts(params, context.limits, text)
    rules = body.message_rules(params, context.limits, text)
    requests = engine_requests(context, body, [prompt], [params])
    envelope = Envelope(
        id_prefix="chatcmpl",
        model=model,
        tokenizer=context.tokenizer,
        prompts=[prompt],
        answer_id=answer_id(requests),
    )
    dialect = context.limits.dialogue.dialect
    form = ChatForm(body, envelope, call_id_length=dialect.id_length if dialect else 0)
    return await respond(http, context, body, requests, rules, form)
