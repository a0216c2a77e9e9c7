"""POST /v1/completions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from engine.core.errors import InvalidRequestError
from server.protocol.completions import CompletionBody, CompletionForm
from server.protocol.form import Envelope
from server.routes.context import Context, InContext, json_body
from server.routes.generate import answer_id, constrain, engine_requests, respond

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(
    http: Request, context: InContext, body: Annotated[CompletionBody, Depends(json_body(CompletionBody))]
) -> Response:
    """Continue one or several prompts."""
    model = context.check_model(body.model)
    params = await constrain(context, body.grammar_spec(), body.params(context.limits))
    prompts = await _prompt_ids(context, body)
    requests = engine_requests(context, body, prompts, [params] * len(prompts))
    envelope = Envelope(
        id_prefix="cmpl", model=model, tokenizer=context.tokenizer, prompts=prompts, answer_id=answer_id(requests)
    )
    return await respond(
        http, context, body, requests, body.text_rules(params, echo=body.echo), CompletionForm(body, envelope)
    )


async def _prompt_ids(context: Context, body: CompletionBody) -> list[list[int]]:
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    encoded = iter(await context.encode(texts, "prompt", add_special_tokens=body.add_special_tokens))
    prompts: list[list[int]] = []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            ids = next(encoded)
        else:
            ids = prompt
            context.limits.check_ids(ids, "prompt")
        if not ids:
            raise InvalidRequestError("The prompt has no tokens; send at least one.", param="prompt")
        prompts.append(body.truncate(ids, context.limits))
    return prompts
