"""POST /v1/embeddings and /v1/score: prompts are computed, and the answer says what the model made of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from engine.core.types import Pooling, PromptInfo
from engine.text.choice import TextRules
from server.client import Answer
from server.generation import Generation
from server.http.disconnect import unless_disconnected
from server.http.slow_thread import run_slowly
from server.protocol.embeddings import EmbeddingBody, Embeddings
from server.protocol.reading import ReadingBody
from server.protocol.score import Score, ScoreBody, Scores
from server.routes.context import InContext, aside, json_body
from server.routes.generate import MAX_INLINE_TOKENS, answer_id, begin, engine_requests, with_timings
from server.routes.openapi import answers
from server.routes.prompts import prompt_ids

router = APIRouter()

Result = TypeVar("Result")

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
    infos = await _each(http, answer, generation, body, lambda _, info: info)

    def document() -> bytes:
        data = [body.shape(index, info.pooled or ()) for index, info in enumerate(infos)]
        return Embeddings(object="list", model=model, data=data, usage=generation.usage).json_bytes()

    made = document() if len(infos) <= MAX_INLINE_VECTORS else await run_slowly(document)
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

    def shape(index: int, info: PromptInfo) -> Score:
        return body.shape(index, info.logprobs or (), firsts[index])

    scores = await _each(http, answer, generation, body, shape)
    made = Scores(
        id=f"score-{answer_id(requests)}",
        object="list",
        created=int(time.time()),
        model=model,
        data=scores,
        usage=generation.usage,
    )
    return with_timings(made.json_bytes(), generation, body)


async def _each(
    http: Request,
    answer: Answer,
    generation: Generation,
    body: ReadingBody,
    shape: Callable[[int, PromptInfo], Result],
) -> list[Result]:
    """What `shape` makes of every prompt, in order. A client that leaves ends it.

    Each is shaped as soon as it is computed, so that the log probabilities of all prompts are never held at once.
    """

    def shape_some(infos: list[tuple[int, PromptInfo]]) -> dict[int, Result]:
        return {index: shape(index, info) for index, info in infos}

    async def shaped() -> list[Result]:
        results: dict[int, Result] = {}
        while news := await generation.next_deltas():
            infos = [(index, delta.prompt) for index, delta in news if delta.prompt is not None]
            num_tokens = sum(len(info.logprobs or ()) for _, info in infos)
            some = partial(shape_some, infos)
            results |= some() if num_tokens <= MAX_INLINE_TOKENS else await run_slowly(some)
        if body.include_metrics:
            await generation.settle()
        return [results[index] for index in sorted(results)]

    with answer:
        return await unless_disconnected(http.receive, shaped())
