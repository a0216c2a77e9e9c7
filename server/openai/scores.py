"""POST /v1/score, /v1/rerank and /v1/classify: endpoints that read prompts and answer with numbers.

Of a model that generates, a score is the log likelihood of text_2 as a continuation of text_1. Both are encoded as one
text. Scored are its tokens from the first that differs from the tokens of text_1 alone: a token that the end of text_1 and
the beginning of text_2 share is scored, too. A classifier of one label reads both texts together. Of an embedder, a score is
the cosine of their vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, ClassVar, NamedTuple

from fastapi import APIRouter, Depends, Request
from pydantic import BeforeValidator, Field, model_validator
from starlette.responses import Response

from engine.core.errors import InvalidRequestError, read_each
from engine.core.types import PromptInfo, SamplingParams
from engine.text.fields.body import Integer, Refused, RequestBody, or_text
from engine.text.fields.sampling import listed
from engine.text.prompt_results import (
    Reduction,
    activated,
    check_likelihoods,
    check_reduction,
    cosine,
    first_scored,
    likelihood,
    unit_vector,
)
from server.answers.model import ServedModel, aside
from server.answers.parts import InConfig, InModel, InResponder
from server.answers.respond import answer_id, with_timings
from server.http.bodies import json_body
from server.http.openapi import answers
from server.openai.completions import Prompts
from server.openai.prompt_only import (
    NO_MESSAGES,
    Few,
    Numbers,
    PromptOnlyBody,
    beside,
    pooling_params,
    read_inputs,
    shape_each,
)
from server.protocol.documents import ResponseBody, Usage
from server.settings.app_config import AppConfig

router = APIRouter()


Texts = Annotated[list[str], BeforeValidator(listed, json_schema_input_type=str | list[str]), Field(min_length=1)]


class ScoringBody(PromptOnlyBody):
    """What bodies for classifiers share."""

    use_activation: bool = Field(True, description="Return a classifier's scores as probabilities.")


class ScoreBody(ScoringBody):
    """The request. Texts are paired in order, or one text_1 with every text_2."""

    text_1: Texts = Field(description="The given text; one for all items of text_2, or one for each.")
    text_2: Annotated[Texts, Few] = Field(description="The continuation whose likelihood is computed.")
    reduction: Reduction = Field("mean", description="mean: log likelihood per token; sum: in total.")

    @model_validator(mode="after")
    def _check_pairs(self) -> ScoreBody:
        firsts, seconds = len(self.text_1), len(self.text_2)
        if firsts not in (1, seconds):
            raise InvalidRequestError(
                f"text_1 has {firsts} texts and text_2 {seconds}; send one text_1, or as many as there are text_2.",
                param="text_1",
            )
        return self


class Score(ResponseBody):
    object: str = Field(description="Which kind of object this is.")
    index: int = Field(description="Its place in the list.")
    score: float = Field(description="The log likelihood.")


class Scores(Numbers):
    """The answer, one entry a pair, in order; vLLM's shape."""

    data: list[Score] = Field(description="The items.")


@router.post("/v1/score", responses=answers(Scores))
@router.post("/score", responses=answers(Scores))
async def create_score(
    http: Request,
    body: Annotated[ScoreBody, Depends(json_body(ScoreBody, spends=True))],
    model: InModel,
    responder: InResponder,
    config: InConfig,
) -> Response:
    """Return the log likelihood of each text_2 as the continuation of its text_1; without an LM head, how well they match."""
    named = model.find(body.model)
    texts = _Texts(body.text_1, body.text_2)
    plan = await _plan(model, config, body, texts, body.reduction)
    requests = responder.requests(body, named.adapter, plan.prompts, [plan.params] * len(plan.prompts))
    shaped, generation = await shape_each(http, responder, body, requests, plan.shape)
    values = await aside(lambda: plan.finish(shaped))
    data = [Score(object="score", index=index, score=value) for index, value in enumerate(values)]
    made = Scores(data=data, **beside(requests, named.name, generation, "score-"))
    return with_timings(made.json_bytes(), generation, body)


class _Plan(NamedTuple):
    """Which prompts to read, and how scores are made of them."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    shape: Callable[[int, PromptInfo], Any]  # what to keep of a prompt
    finish: Callable[[list[Any]], list[float]] = lambda scores: scores


class _Texts(NamedTuple):
    """What is compared: one of `firsts` with all `seconds`, or each with each; `names` are the fields that they are in."""

    firsts: Sequence[str]
    seconds: Sequence[str]
    names: tuple[str, str] = ("text_1", "text_2")
    types: tuple[str | None, str | None] = (None, None)  # whose prompts an embedder has


async def _plan(model: ServedModel, config: AppConfig, body: ScoringBody, texts: _Texts, reduction: Reduction) -> _Plan:
    """Return how a model compares texts. Raises ClientError."""
    if not model.reader.settings.labels and not model.limits.generates:
        check_reduction(reduction)
        return await _cosines(model, config, body, texts)
    firsts, seconds, names, _ = texts
    firsts = list(firsts) * (len(seconds) if len(firsts) == 1 else 1)
    num_chars = sum(map(len, firsts)) + sum(map(len, seconds))
    if num_chars > config.max_body_bytes:
        raise InvalidRequestError(
            f"The pairs have {num_chars} characters, {names[0]} repeated; one request may have {config.max_body_bytes} "
            "(--max-body-bytes), send fewer pairs.",
            param=names[1],
        )
    if model.limits.generates:
        return await _likelihoods(model, body, firsts, seconds, reduction)
    check_reduction(reduction)
    model.reader.require_one_label()
    truncation = body.truncation(model.reader)
    activation = model.reader.settings.pair_activation if body.use_activation else ""

    def read(pair: tuple[str, str]) -> list[int]:
        return model.reader.pair(*pair, names, truncation, add_special_tokens=body.add_special_tokens)

    prompts = await aside(lambda: read_each(read, list(zip(firsts, seconds, strict=True))), num_chars)
    params = pooling_params(model, config)
    return _Plan(prompts, params, lambda _, info: activated(info.pooled or (0.0,), activation)[0])


async def _likelihoods(
    model: ServedModel, body: PromptOnlyBody, firsts: Sequence[str], seconds: Sequence[str], reduction: Reduction
) -> _Plan:
    check_likelihoods(seconds, body.truncate_prompt_tokens)
    special, single = body.add_special_tokens, len(set(firsts)) == 1
    wholes = [first + second for first, second in zip(firsts, seconds, strict=True)]
    contexts = await model.encode(firsts[:1] if single else firsts, "text_1", add_special_tokens=special)
    read_each(lambda ids: model.limits.check_readable(len(ids), "text_1"), contexts)
    prompts = await model.encode(wholes, "text_2", add_special_tokens=special)
    read_each(lambda ids: model.limits.check_readable(len(ids), "text_2"), prompts)
    places = await aside(lambda: list(map(first_scored, contexts * (len(prompts) if single else 1), prompts)))

    def shape(index: int, info: PromptInfo) -> float:
        return likelihood(info.logprobs or (), places[index], reduction)

    return _Plan(prompts, SamplingParams(max_tokens=0, prompt_logprobs=0), shape)


async def _cosines(model: ServedModel, config: AppConfig, body: PromptOnlyBody, given: _Texts) -> _Plan:
    reader, truncation = model.reader, body.truncation(model.reader)

    def read(texts: Sequence[str], name: str, prompt: str) -> list[list[int]]:
        def ids_of(text: str) -> list[int]:
            ids = reader.text(text, name, truncation, prompt=prompt, add_special_tokens=body.add_special_tokens)
            model.limits.check_readable(len(ids), name)
            return ids

        return read_each(ids_of, texts)

    both = tuple(zip(given[:2], given.names, map(reader.prompt, given.types), strict=True))
    prompts = await aside(lambda: [ids for each in both for ids in read(*each)], sum(map(len, chain(*given[:2]))))

    def finish(vectors: list[Any]) -> list[float]:
        one, others = vectors[: len(given.firsts)], vectors[len(given.firsts) :]
        pairs = zip(one * (len(others) if len(one) == 1 else 1), others, strict=True)
        return [cosine(first, second) for first, second in pairs]

    return _Plan(prompts, pooling_params(model, config), lambda _, info: unit_vector(info.pooled or ()), finish)


class Document(RequestBody):
    """A document, as Cohere's clients send it."""

    text: str = Field(description="Its text.")


_document = or_text(lambda text: {"text": text}, dict)


class RerankBody(ScoringBody):
    """The request, in the shape of Cohere and Jina."""

    UNSUPPORTED: ClassVar[Mapping[str, Refused]] = {
        **PromptOnlyBody.UNSUPPORTED,
        "max_chunks_per_doc": Refused((), "send truncate_prompt_tokens"),
        "max_tokens_per_doc": Refused((), "send truncate_prompt_tokens"),
        "rank_fields": Refused((["text"],)),
        "top_k": Refused((), "send top_n"),
    }

    query: str = Field(description="What is looked for.")
    documents: Annotated[
        list[Annotated[Document, BeforeValidator(_document, json_schema_input_type=str | Document)]], Few
    ] = Field(min_length=1, description="Texts, or objects with a text.")
    top_n: Integer | None = Field(None, ge=1, description="Return so many documents, the best ones.")
    return_documents: bool = Field(True, description="Return the documents' texts, too.")


class RankedDocument(ResponseBody):
    text: str = Field(description="Its text.")


class Ranked(ResponseBody):
    index: int = Field(description="The document's place in the request.")
    relevance_score: float = Field(description="How well it answers the query.")
    document: RankedDocument | None = Field(None, description="The document.")


class Ranking(ResponseBody):
    """The answer, the best document first."""

    id: str = Field(description="The object's name; stored objects are found by it.")
    model: str = Field(description="The model or adapter that answered.")
    results: list[Ranked] = Field(description="The documents.")
    usage: Usage = Field(description="How many tokens were read and generated.")


@router.post("/v1/rerank", responses=answers(Ranking))
@router.post("/v2/rerank", responses=answers(Ranking))
@router.post("/rerank", responses=answers(Ranking))
async def create_ranking(
    http: Request,
    body: Annotated[RerankBody, Depends(json_body(RerankBody, spends=True))],
    model: InModel,
    responder: InResponder,
    config: InConfig,
) -> Response:
    """Sort documents by how well they answer a query: by a classifier of one label, or by the vectors of an embedder."""
    model.reader.require_relevance()
    named, texts = model.find(body.model), [each.text for each in body.documents]
    given = _Texts([body.query], texts, ("query", "documents"), ("query", "document"))
    plan = await _plan(model, config, body, given, "mean")
    requests = responder.requests(body, named.adapter, plan.prompts, [plan.params] * len(plan.prompts))
    shaped, generation = await shape_each(http, responder, body, requests, plan.shape)
    values = await aside(lambda: plan.finish(shaped))
    best = sorted(range(len(values)), key=lambda index: -values[index])[: body.top_n]
    results = [Ranked(index=index, relevance_score=values[index]) for index in best]
    if body.return_documents:
        for result in results:
            result.document = RankedDocument(text=texts[result.index])
    made = Ranking(id=f"rerank-{answer_id(requests)}", model=named.name, results=results, usage=generation.usage)
    return with_timings(made.json_bytes(), generation, body)


class ClassifyBody(ScoringBody):
    """The request. `input` takes the same as the prompt of a completion."""

    UNSUPPORTED: ClassVar[Mapping[str, Refused]] = {**ScoringBody.UNSUPPORTED, "messages": NO_MESSAGES}

    input: Annotated[Prompts, Few] = Field(
        description="A text, token ids, or a list of either; each gets the scores of all labels."
    )


class Classified(ResponseBody):
    index: int = Field(description="Its place in the list.")
    label: str | None = Field(description="The label of the best score; null where there is only one.")
    probs: list[float] = Field(description="The scores of all labels, in the order of the model's.")
    num_classes: int = Field(description="How many labels there are.")


class Classes(Numbers):
    """The answer, one entry an input, in order; vLLM's shape."""

    data: list[Classified] = Field(description="The items.")


@router.post("/v1/classify", responses=answers(Classes))
@router.post("/classify", responses=answers(Classes))
async def classify(
    http: Request,
    body: Annotated[ClassifyBody, Depends(json_body(ClassifyBody, spends=True))],
    model: InModel,
    responder: InResponder,
    config: InConfig,
) -> Response:
    """Return the scores of a classifier's labels for each input."""
    model.reader.require_labels()
    named, settings = model.find(body.model), model.reader.settings
    requests = await read_inputs(model, responder, config, body, body.input, named.adapter)

    def shape(index: int, info: PromptInfo) -> Classified:
        scores = activated(info.pooled or (), settings.activation if body.use_activation else "")
        label = settings.labels[scores.index(max(scores))] if len(scores) > 1 else None
        return Classified(index=index, label=label, probs=scores, num_classes=len(scores))

    data, generation = await shape_each(http, responder, body, requests, shape)
    made = Classes(data=data, **beside(requests, named.name, generation, "classify-"))
    return with_timings(made.json_bytes(), generation, body)
