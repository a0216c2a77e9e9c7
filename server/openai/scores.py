"""POST /v1/score, /v1/rerank and /v1/classify: endpoints that read prompts and answer with numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from fastapi import APIRouter, Depends, Request
from pydantic import BeforeValidator, Field, model_validator
from starlette.responses import Response

from engine.core.errors import InvalidRequestError
from engine.core.types import PromptInfo
from engine.core.types import Request as EngineRequest
from engine.text.fields.body import Integer, Refused, RequestBody, or_text
from engine.text.fields.sampling import listed
from engine.text.prompt_results import activated
from engine.text.requests.scoring import Compared, Reduction, plan_scores
from server.answers.generation import Generation
from server.answers.model import Named, ServedModel, aside
from server.answers.parts import InConfig, InModel, InResponder
from server.answers.respond import Responder, answer_id, with_timings
from server.http.bodies import json_body
from server.http.openapi import answers
from server.openai.completions import Prompts
from server.openai.prompt_only import NO_MESSAGES, Few, Numbers, PromptOnlyBody, beside, read_inputs, shape_each
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
    texts = Compared(body.text_1, body.text_2)
    named = model.find(body.model)
    values, requests, generation = await _scored(http, model, responder, config, body, named, texts, body.reduction)
    data = [Score(object="score", index=index, score=value) for index, value in enumerate(values)]
    made = Scores(data=data, **beside(requests, named.name, generation, "score-"))
    return with_timings(made.json_bytes(), generation, body)


async def _scored(
    http: Request,
    model: ServedModel,
    responder: Responder,
    config: AppConfig,
    body: ScoringBody,
    named: Named,
    texts: Compared,
    reduction: Reduction = "mean",
) -> tuple[list[float], Sequence[EngineRequest], Generation]:
    """Return the scores of pairs of texts. Raises ClientError."""
    reader = model.reader
    num_chars = sum([len(first) + len(second) for first, second in texts.pairs])
    if num_chars > config.max_body_bytes and not reader.compares_vectors:
        raise InvalidRequestError(
            f"The pairs have {num_chars} characters, {texts.names[0]} repeated; one request may have "
            f"{config.max_body_bytes} (--max-body-bytes), send fewer pairs.",
            param=texts.names[1],
        )
    plan = await aside(
        lambda: plan_scores(
            reader,
            texts,
            body.truncation(reader),
            reader.pooling(config.pooling),
            reduction=reduction,
            use_activation=body.use_activation,
            add_special_tokens=body.add_special_tokens,
        ),
        num_chars,
    )
    requests = responder.requests(body, named.adapter, plan.prompts, [plan.params] * len(plan.prompts))
    kept, generation = await shape_each(http, responder, body, requests, plan.shape)
    return await aside(lambda: plan.scores(kept)), requests, generation


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
    given = Compared([body.query], texts, ("query", "documents"), ("query", "document"))
    values, requests, generation = await _scored(http, model, responder, config, body, named, given)
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
