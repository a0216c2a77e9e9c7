"""POST /v1/completions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from server.protocol.completions import Completion, CompletionBody, CompletionForm
from server.protocol.form import Chunks, Envelope
from server.routes.context import InContext, aside, json_body
from server.routes.generate import answer_id, constrain, engine_requests, respond
from server.routes.openapi import answers
from server.routes.prompts import prompt_ids

router = APIRouter()


@router.post("/v1/completions", responses=answers(Completion, streams=True))
async def create_completion(
    http: Request, context: InContext, body: Annotated[CompletionBody, Depends(json_body(CompletionBody))]
) -> Response:
    """Continue one or several prompts."""
    model = context.check_model(body.model)
    wanted, grammar = await aside(lambda: (body.params(context.limits), body.grammar_spec()))
    params = await constrain(context, grammar, wanted)
    ids = await prompt_ids(context, body.prompt, "prompt", add_special_tokens=body.add_special_tokens)
    prompts = [body.truncate(prompt, context.limits) for prompt in ids]
    requests = engine_requests(context, body, prompts, [params] * len(prompts))
    envelope = Envelope(
        id_prefix="cmpl", model=model, tokenizer=context.tokenizer, prompts=prompts, answer_id=answer_id(requests)
    )
    form = Chunks(CompletionForm(body, envelope), body.stream_usage)
    return await respond(http, context, body, requests, body.text_rules(params, echo=body.echo), form)
