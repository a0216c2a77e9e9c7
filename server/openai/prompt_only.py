"""POST /v1/embeddings and /v1/score: endpoints that read prompts and generate nothing.

A vector of an embedding is the hidden state of a prompt's last token, or the mean of all.

A score is the log likelihood of text_2 as a continuation of text_1. Both are encoded as one text. Scored are its tokens from
the first that differs from the tokens of text_1 alone: a token that the end of text_1 and the beginning of text_2 share is
scored, too. A model without an LM head has no likelihoods: its score is the cosine of the two texts' vectors.
"""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from fastapi import APIRouter, Depends, Request
from pydantic import BeforeValidator, Field, model_validator
from starlette.responses import Response

from engine.core.errors import InvalidRequestError
from engine.core.types import Pooling, PromptInfo, SamplingParams
from engine.core.types import Request as EngineRequest
from engine.text.chat.choice import TextRules
from engine.text.fields.body import Integer, Refused
from engine.text.prompt_results import Reduction, check_reduction, cosine, first_scored, likelihood, unit_vector
from server.answers.body import EngineBody
from server.answers.generation import Generation
from server.answers.model import ServedModel, aside
from server.answers.parts import InConfig, InModel, InResponder
from server.answers.respond import MAX_INLINE_TOKENS, Responder, answer_id, with_timings
from server.http.bodies import json_body
from server.http.openapi import answers
from server.http.threads import run_slowly, unless_disconnected
from server.openai.completions import Prompts, prompt_ids
from server.protocol.documents import ResponseBody, Usage
from server.settings.app_config import AppConfig

router = APIRouter()

MAX_INPUTS = 2048  # of one request; OpenAI's limit


class PromptOnlyBody(EngineBody):
    """The fields that both requests share."""

    NO_OPS: ClassVar[frozenset[str]] = frozenset({"request_id"})
    UNSUPPORTED: ClassVar[Mapping[str, Refused]] = {
        "stream": Refused((False,)),
        "truncate_prompt_tokens": Refused(),
        "truncation_side": Refused(("left", "right")),
    }

    add_special_tokens: bool = Field(True, description="Whether the tokenizer adds its special tokens, such as BOS.")


def check_num_inputs(num: int, param: str) -> None:
    """Raise InvalidRequestError for too many inputs."""
    if num > MAX_INPUTS:
        raise InvalidRequestError(f"{param} has {num} items; one request may have at most {MAX_INPUTS}.", param=param)


Result = TypeVar("Result")


async def shape_each(
    http: Request,
    responder: Responder,
    body: PromptOnlyBody,
    requests: Sequence[EngineRequest],
    shape: Callable[[int, PromptInfo], Result],
) -> tuple[list[Result], Generation]:
    """Run requests, and return what `shape` makes of each prompt, in order.

    Each is shaped as soon as it is computed, so that the log probabilities of all prompts are never held together. A
    client that leaves ends it.
    """
    answer, generation = responder.submit(http, requests, TextRules())
    results: dict[int, Result] = {}

    async def shape_all() -> None:
        while news := await generation.next_deltas():
            infos = [(index, delta.prompt) for index, delta in news if delta.prompt is not None]
            num_tokens = sum(len(info.logprobs or ()) for _, info in infos)
            some = partial(_shape_some, infos, shape)
            results.update(some() if num_tokens <= MAX_INLINE_TOKENS else await run_slowly(some))
        if body.include_metrics:
            await generation.settle()

    with answer:
        await unless_disconnected(http.receive, shape_all())
    return [results[index] for index in sorted(results)], generation


def _shape_some(infos: list[tuple[int, PromptInfo]], shape: Callable[[int, PromptInfo], Result]) -> dict[int, Result]:
    return {index: shape(index, info) for index, info in infos}


MAX_INLINE_VECTORS = 16  # about 2 ms; more are written on a worker thread


class EmbeddingBody(PromptOnlyBody):
    """The request. `input` takes the same as the prompt of a completion."""

    UNSUPPORTED: ClassVar[Mapping[str, Refused]] = {
        **PromptOnlyBody.UNSUPPORTED,
        "embed_dtype": Refused(("float32",)),
        "endianness": Refused(("native", "little")),
        "messages": Refused((), "send input; /tokenize gives the token ids of messages, which it may have"),
        "normalize": Refused((True,)),
        "use_activation": Refused((True,)),
    }

    input: Prompts = Field(description="A text, token ids, or a list of either; each gets one vector.")
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="Vectors as numbers, or as base64 of float32."
    )
    dimensions: Integer | None = Field(
        None, ge=1, description="Cut each vector to so many numbers and scale it to length one."
    )

    @model_validator(mode="after")
    def _check_size(self) -> EmbeddingBody:
        check_num_inputs(len(self.input), "input")
        return self

    def shape(self, index: int, pooled: Sequence[float]) -> Embedding:
        """Return an input's vector. Raises InvalidRequestError for too many dimensions."""
        vector = unit_vector(pooled, self.dimensions)
        if self.encoding_format == "float":
            return Embedding(object="embedding", index=index, embedding=vector.tolist())
        return Embedding(object="embedding", index=index, embedding=b64encode(vector.tobytes()).decode())


class Embedding(ResponseBody):
    object: str = Field(description="Which kind of object this is.")
    index: int = Field(description="Its place in the list.")
    embedding: list[float] | str = Field(description="The vector, as numbers or as base64.")


class Embeddings(ResponseBody):
    """The answer, one entry an input, in order."""

    object: str = Field(description="Which kind of object this is.")
    model: str = Field(description="The model or adapter that answered.")
    data: list[Embedding] = Field(description="The items.")
    usage: Usage = Field(description="How many tokens were read and generated.")


@router.post("/v1/embeddings", responses=answers(Embeddings))
async def create_embeddings(
    http: Request,
    model: InModel,
    responder: InResponder,
    config: InConfig,
    body: Annotated[EmbeddingBody, Depends(json_body(EmbeddingBody, spends=True))],
) -> Response:
    """Return the model's final hidden states, as one vector an input."""
    named = model.find(body.model)
    params = SamplingParams(max_tokens=0, pooling=Pooling(config.pooling))
    prompts = await prompt_ids(model, body.input, "input", add_special_tokens=body.add_special_tokens)
    model.limits.check_readable(max(map(len, prompts)), "input")
    requests = responder.requests(body, named.adapter, prompts, [params] * len(prompts))
    infos, generation = await shape_each(http, responder, body, requests, lambda _, info: info)

    def document() -> bytes:
        data = [body.shape(index, info.pooled or ()) for index, info in enumerate(infos)]
        return Embeddings(object="list", model=named.name, data=data, usage=generation.usage).json_bytes()

    made = document() if len(infos) <= MAX_INLINE_VECTORS else await run_slowly(document)
    return with_timings(made, generation, body)


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
