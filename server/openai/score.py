"""POST /v1/score: the log likelihood of text_2 as a continuation of text_1.

Both are encoded as one text. Scored are its tokens from the first that differs from the tokens of text_1 alone: a token
that the end of text_1 and the beginning of text_2 share is scored, too.

A model without an LM head has no likelihoods: its score is the cosine of the two texts' vectors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Depends, Request
from pydantic import BeforeValidator, Field, model_validator
from starlette.responses import Response

from engine.core.errors import InvalidRequestError
from engine.core.types import Pooling, PromptInfo, SamplingParams
from engine.text.prompt_results import Reduction, check_reduction, cosine, first_scored, likelihood, unit_vector
from server.answers.model import ServedModel, aside
from server.answers.parts import InConfig, InModel, InResponder
from server.answers.respond import answer_id, with_timings
from server.http.bodies import json_body
from server.http.openapi import answers
from server.openai.prompt_only import PromptOnlyBody, check_num_inputs, shape_each
from server.protocol.documents import ResponseBody, Usage
from server.settings.app_config import AppConfig

router = APIRouter()


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Texts = Annotated[list[str], BeforeValidator(_listed, json_schema_input_type=str | list[str]), Field(min_length=1)]


class ScoreBody(PromptOnlyBody):
    """The request. Texts are paired in order, or one text_1 with every text_2."""

    text_1: Texts = Field(description="The given text; one for all items of text_2, or one for each.")
    text_2: Texts = Field(description="The continuation whose likelihood is computed.")
    reduction: Reduction = Field("mean", description="mean: log likelihood per token; sum: in total.")

    @model_validator(mode="after")
    def _check_pairs(self) -> ScoreBody:
        firsts, seconds = len(self.text_1), len(self.text_2)
        check_num_inputs(seconds, "text_2")
        if firsts not in (1, seconds):
            raise InvalidRequestError(
                f"text_1 has {firsts} texts and text_2 {seconds}; send one text_1, or as many as there are text_2.",
                param="text_1",
            )
        if "" in self.text_2:
            raise InvalidRequestError(
                "text_2 has an empty text, which has no likelihood; leave it out.", param="text_2"
            )
        return self

    def wholes(self, most_chars: int) -> list[str]:
        """Return each pair as one text. Raises InvalidRequestError if they are too long."""
        firsts = self.text_1 * len(self.text_2) if len(self.text_1) == 1 else self.text_1
        num_chars = sum(map(len, firsts)) + sum(map(len, self.text_2))
        if num_chars > most_chars:
            raise InvalidRequestError(
                f"The pairs have {num_chars} characters, text_1 repeated; one request may have {most_chars} "
                "(--max-body-bytes), send fewer pairs.",
                param="text_2",
            )
        return [first + second for first, second in zip(firsts, self.text_2, strict=True)]


class Score(ResponseBody):
    object: str = Field(description="Which kind of object this is.")
    index: int = Field(description="Its place in the list.")
    score: float = Field(description="The log likelihood.")


class Scores(ResponseBody):
    """The answer, one entry a pair, in order; vLLM's shape."""

    id: str = Field(description="The object's name; stored objects are found by it.")
    object: str = Field(description="Which kind of object this is.")
    created: int = Field(description="When it was made, in seconds since 1970.")
    model: str = Field(description="The model or adapter that answered.")
    data: list[Score] = Field(description="The items.")
    usage: Usage = Field(description="How many tokens were read and generated.")


@router.post("/v1/score", responses=answers(Scores))
@router.post("/score", responses=answers(Scores))
async def create_score(
    http: Request,
    model: InModel,
    responder: InResponder,
    config: InConfig,
    body: Annotated[ScoreBody, Depends(json_body(ScoreBody, spends=True))],
) -> Response:
    """Return the log likelihood of each text_2 as the continuation of its text_1; without an LM head, their cosine."""
    named = model.find(body.model)
    plan = await (_likelihoods if model.limits.generates else _cosines)(model, config, body)
    requests = responder.requests(body, named.adapter, plan.prompts, [plan.params] * len(plan.prompts))
    shaped, generation = await shape_each(http, responder, body, requests, plan.shape)
    values = await aside(lambda: plan.finish(shaped))
    made = Scores(
        id=f"score-{answer_id(requests)}",
        object="list",
        created=int(time.time()),
        model=named.name,
        data=[Score(object="score", index=index, score=value) for index, value in enumerate(values)],
        usage=generation.usage,
    )
    return with_timings(made.json_bytes(), generation, body)


class _Plan(NamedTuple):
    """Which prompts to read, and how scores are made of them."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    shape: Callable[[int, PromptInfo], Any]  # what to keep of a prompt
    finish: Callable[[list[Any]], list[float]]


async def _likelihoods(model: ServedModel, config: AppConfig, body: ScoreBody) -> _Plan:
    special = body.add_special_tokens
    wholes = await aside(lambda: body.wholes(config.max_body_bytes))
    contexts = await model.encode(body.text_1, "text_1", add_special_tokens=special)
    prompts = await model.encode(wholes, "text_2", add_special_tokens=special)
    model.limits.check_readable(max(map(len, prompts)), "text_2")
    alone = contexts * len(prompts) if len(contexts) == 1 else contexts
    firsts = await aside(lambda: list(map(first_scored, alone, prompts)))

    def shape(index: int, info: PromptInfo) -> float:
        return likelihood(info.logprobs or (), firsts[index], body.reduction)

    return _Plan(prompts, SamplingParams(max_tokens=0, prompt_logprobs=0), shape, lambda scores: scores)


async def _cosines(model: ServedModel, config: AppConfig, body: ScoreBody) -> _Plan:
    check_reduction(body.reduction)
    prompts = []
    for texts, name in ((body.text_1, "text_1"), (body.text_2, "text_2")):
        read = await model.encode(texts, name, add_special_tokens=body.add_special_tokens)
        model.limits.check_readable(max(map(len, read)), name)
        prompts += read

    def finish(vectors: list[Any]) -> list[float]:
        firsts, seconds = vectors[: len(body.text_1)], vectors[len(body.text_1) :]
        pairs = zip(firsts * (len(seconds) if len(firsts) == 1 else 1), seconds, strict=True)
        return [cosine(first, second) for first, second in pairs]

    params = SamplingParams(max_tokens=0, pooling=Pooling(config.pooling))
    return _Plan(prompts, params, lambda _, info: unit_vector(info.pooled or ()), finish)
