"""POST /v1/embeddings and /v1/score: prompts are computed, and it is told what the model made of them."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from engine.core.types import Pooling, PromptInfo
from server.choice import Delta, TextRules
from server.protocol.embeddings import EmbeddingBody, Embeddings
from server.protocol.score import ScoreBody, Scores
from server.routes.context import InContext, aside, json_body
from server.routes.generate import MAX_INLINE_TOKENS, all_deltas, answer_id, begin, engine_requests, with_timings
from server.routes.openapi import answers
from server.routes.prompts import prompt_ids
from server.slow_thread import run_slowly

router = APIRouter()

MAX_INLINE_VECTORS = 16  # about 2 ms; more are written on a worker thread, so that other requests are not held up


@router.post("/v1/embeddings", responses=answers(Embeddings))
async def create_embeddings(
    http: Request, context: InContext, body: Annotated[EmbeddingBody, Depends(json_body(EmbeddingBody))]
) -> Response:
    """The model's final hidden states as one vector an input."""
    model = context.check_model(body.model)
    params = body.reading_params(pooling=Pooling(context.config.pooling))
    prompts = await prompt_ids(context, body.input, "input", add_special_tokens=body.add_special_tokens)
    body.check_lengths(prompts, "input", context.limits)
    requests = engine_requests(context, body, prompts, [params] * len(prompts))
    answer, generation = begin(http, context, requests, TextRules())
    deltas = await all_deltas(http, answer, generation, body)

    def document() -> bytes:
        data = [body.shape(index, _prompt(delta).pooled or ()) for index, delta in enumerate(deltas)]
        return Embeddings(object="list", model=model, data=data, usage=generation.usage).json_bytes()

    made = document() if len(deltas) <= MAX_INLINE_VECTORS else await run_slowly(document)
    return with_timings(made, generation, body)


@router.post("/v1/score", responses=answers(Scores))
@router.post("/score", responses=answers(Scores))
async def create_score(
    http: Request, context: InContext, body: Annotated[ScoreBody, Depends(json_body(ScoreBody))]
) -> Response:
    """The log likelihood of each text_2 as the continuation of its text_1."""
    model = context.check_model(body.model)
    params = body.reading_params(prompt_logprobs=0)
    special = body.add_special_tokens
    wholes = await aside(lambda: body.wholes(context.config.max_body_bytes))
    contexts = await context.encode(body.text_1, "text_1", add_special_tokens=special)
    prompts = await context.encode(wholes, "text_2", add_special_tokens=special)
    body.check_lengths(prompts, "text_2", context.limits)
    firsts = await aside(lambda: body.first_scored(contexts, prompts))
    requests = engine_requests(context, body, prompts, [params] * len(prompts))
    answer, generation = begin(http, context, requests, TextRules())
    deltas = await all_deltas(http, answer, generation, body)

    def document() -> bytes:
        pairs = enumerate(zip(deltas, firsts, strict=True))
        return Scores(
            id=f"score-{answer_id(requests)}",
            object="list",
            created=int(time.time()),
            model=model,
            data=[body.shape(index, _prompt(delta).logprobs or (), first) for index, (delta, first) in pairs],
            usage=generation.usage,
        ).json_bytes()

    num_tokens = sum(map(len, prompts))
    return with_timings(document() if num_tokens <= MAX_INLINE_TOKENS else await run_slowly(document), generation, body)


def _prompt(delta: Delta) -> PromptInfo:
    """What the engine tells of every prompt that it has computed."""
    assert delta.prompt is not None
    return delta.prompt
