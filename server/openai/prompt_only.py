"""POST /v1/embeddings and /pooling, and what they share with other endpoints that read prompts and generate nothing.

A vector is made of the hidden states of a prompt as the model's files say. scores.py has the endpoints of scores.
"""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import AfterValidator, Field, ValidationInfo, model_validator
from starlette.responses import Response

from engine.core.errors import InvalidRequestError, UnsupportedError, read_each
from engine.core.types import Adapter, PoolingParams, PromptInfo
from engine.core.types import Request as EngineRequest
from engine.text.chat.choice import TextRules
from engine.text.fields.body import Integer, Refused
from engine.text.prompt_results import activated, unit_vector
from engine.text.requests.vector_reader import Truncation, VectorReader
from server.answers.body import EngineBody
from server.answers.generation import Generation
from server.answers.model import ServedModel, aside
from server.answers.parts import InConfig, InModel, InResponder
from server.answers.respond import MAX_INLINE_TOKENS, Responder, answer_id, with_timings
from server.http.bodies import json_body
from server.http.openapi import answers
from server.http.threads import Result, run_slowly, unless_disconnected
from server.openai.completions import Prompt, Prompts
from server.protocol.documents import Headed, ResponseBody, Usage
from server.settings.app_config import AppConfig

router = APIRouter()

_OFF = (False, 0, None)
NO_MESSAGES = Refused((), "send input; /tokenize gives the token ids of messages, which it may have")
MAX_INPUTS = 2048  # of one request; OpenAI's limit


class PromptOnlyBody(EngineBody):
    """The fields that both requests share."""

    NO_OPS: ClassVar[frozenset[str]] = frozenset({"request_id"})
    UNSUPPORTED: ClassVar[Mapping[str, Refused]] = {
        "stream": Refused((False,)),
        **dict.fromkeys(
            ("return_sparse", "sparse", "sparse_embedding"),
            Refused(_OFF, "one dense vector is made of a text, no weights of words"),
        ),
        **dict.fromkeys(
            ("multi_vector", "return_colbert_vecs"),
            Refused(_OFF, "one vector is made of a text, not one of each token"),
        ),
        **dict.fromkeys(("activation", "softmax"), Refused((True,), "send use_activation")),
        "raw_scores": Refused((False,), "send use_activation"),
        **dict.fromkeys(("instruct", "instruction"), Refused(("",), "put it into the text")),
    }

    add_special_tokens: bool = Field(True, description="Whether the tokenizer adds its special tokens, such as BOS.")
    truncate_prompt_tokens: Integer | None = Field(
        None, description="Cut longer texts to so many tokens; -1: to as many as the model takes."
    )
    truncation_side: Literal["left", "right"] = Field("right", description="Where they are cut.")

    def truncation(self, reader: VectorReader) -> Truncation:
        """Return how texts are cut. Raises InvalidRequestError."""
        return reader.truncation(self.truncate_prompt_tokens, self.truncation_side)


def _few(inputs: list[Any], info: ValidationInfo) -> list[Any]:
    """Return the items of a field. Raises InvalidRequestError for too many."""
    if len(inputs) > MAX_INPUTS:
        message = f"{info.field_name} has {len(inputs)} items; one request may have at most {MAX_INPUTS}."
        raise InvalidRequestError(message, param=info.field_name)
    return inputs


Few = AfterValidator(_few)  # of an annotation


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


class Numbers(Headed):
    """What lists of numbers have beside them."""

    usage: Usage = Field(description="How many tokens were read and generated.")


def beside(requests: Sequence[EngineRequest], model: str, generation: Generation, prefix: str) -> dict[str, Any]:
    """Return the fields of Numbers."""
    return {
        "id": prefix + answer_id(requests),
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "usage": generation.usage,
    }


class EmbeddingBody(PromptOnlyBody):
    """The request. `input` takes the same as the prompt of a completion."""

    UNSUPPORTED: ClassVar[Mapping[str, Refused]] = {
        **PromptOnlyBody.UNSUPPORTED,
        "embed_dtype": Refused(("float32",)),
        "embedding_types": Refused((["float"],), "send encoding_format"),
        "endianness": Refused(("native", "little")),
        "late_chunking": Refused((False,), "each input is read alone"),
        "messages": NO_MESSAGES,
        "normalized": Refused((), "send normalize"),
        "output_dimension": Refused((), "send dimensions"),
        "prompt_name": Refused((), "send input_type"),
        "task": Refused(("embed",), "send input_type"),
        "use_activation": Refused((True,)),
    }

    input: Annotated[Prompts, Few] = Field(description="A text, token ids, or a list of either; each gets one vector.")
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="Vectors as numbers, or as base64 of float32."
    )
    dimensions: Integer | None = Field(
        None, ge=1, description="Cut each vector to so many numbers and scale it to length one."
    )

    input_type: str | None = Field(
        None,
        description="The name of the prompt that comes before each text: query, document, or another of the model's.",
    )
    normalize: bool | None = Field(
        None, description="Scale vectors to length one; if left out, as the model's files say."
    )

    def shape(self, pooled: Sequence[float], *, normalizes: bool) -> list[float] | str:
        """Return an input's vector. Raises InvalidRequestError for too many dimensions."""
        vector = unit_vector(pooled, self.dimensions, normalizes=normalizes)
        return vector.tolist() if self.encoding_format == "float" else b64encode(vector.tobytes()).decode()


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
    body: Annotated[EmbeddingBody, Depends(json_body(EmbeddingBody, spends=True))],
    model: InModel,
    responder: InResponder,
    config: InConfig,
) -> Response:
    """Return one vector an input, made of the model's final hidden states."""
    model.reader.require_vectors()
    named = model.find(body.model)
    requests = await read_inputs(model, responder, config, body, body.input, named.adapter, body.input_type)
    infos, generation = await shape_each(http, responder, body, requests, lambda _, info: info)
    normalizes = model.reader.normalizes(body.normalize, body.dimensions)

    def document() -> bytes:
        vectors = [body.shape(info.pooled or (), normalizes=normalizes) for info in infos]
        data = [Embedding(object="embedding", index=index, embedding=each) for index, each in enumerate(vectors)]
        return Embeddings(object="list", model=named.name, data=data, usage=generation.usage).json_bytes()

    made = document() if len(infos) <= MAX_INLINE_VECTORS else await run_slowly(document)
    return with_timings(made, generation, body)


class PoolingBody(EmbeddingBody):
    """The request; a classifier's vectors have the scores of its labels."""

    UNSUPPORTED: ClassVar[Mapping[str, Refused]] = {
        name: each for name, each in EmbeddingBody.UNSUPPORTED.items() if name not in ("task", "use_activation")
    }

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = Field(
        None, description="embed or classify: what the model does."
    )
    use_activation: bool = Field(True, description="Return scores as probabilities.")

    @model_validator(mode="after")
    def _check_task(self) -> PoolingBody:
        if self.task in ("token_embed", "token_classify"):
            raise UnsupportedError(
                "task", f"{self.task} asks for several vectors a text, and one is made; send embed or classify"
            )
        return self


class PooledData(ResponseBody):
    object: str = Field(description="Which kind of object this is.")
    index: int = Field(description="Its place in the list.")
    data: list[float] | str = Field(description="The vector, as numbers or as base64.")


class PooledList(Numbers):
    """The answer, one entry an input, in order; vLLM's shape."""

    data: list[PooledData] = Field(description="The items.")


@router.post("/pooling", responses=answers(PooledList))
async def create_pooling(
    http: Request,
    body: Annotated[PoolingBody, Depends(json_body(PoolingBody, spends=True))],
    model: InModel,
    responder: InResponder,
    config: InConfig,
) -> Response:
    """Return what the model makes of each input: a vector, or the scores of its labels."""
    settings = model.reader.settings
    if body.task == "classify":
        model.reader.require_labels()
    elif body.task == "embed":
        model.reader.require_vectors()
    named = model.find(body.model)
    requests = await read_inputs(model, responder, config, body, body.input, named.adapter, body.input_type)
    infos, generation = await shape_each(http, responder, body, requests, lambda _, info: info)

    def document() -> bytes:
        activation = settings.activation if body.use_activation else ""
        vectors = [activated(info.pooled or (), activation) for info in infos]
        asked = body.normalize if body.use_activation else bool(body.normalize)
        normalizes = model.reader.normalizes(asked, body.dimensions)
        shaped = [body.shape(each, normalizes=normalizes) for each in vectors]
        data = [PooledData(object="pooling", index=index, data=each) for index, each in enumerate(shaped)]
        return PooledList(data=data, **beside(requests, named.name, generation, "pool-")).json_bytes()

    return with_timings(await run_slowly(document), generation, body)


async def read_inputs(
    model: ServedModel,
    responder: Responder,
    config: AppConfig,
    body: PromptOnlyBody,
    inputs: Sequence[Prompt],
    adapter: Adapter | None,
    input_type: str | None = None,
) -> list[EngineRequest]:
    """Return one request an input, a text or token ids, behind its prompt. Raises ClientError."""
    reader, special = model.reader, body.add_special_tokens
    truncation, prompt = body.truncation(reader), reader.prompt(input_type)

    def read(one: Prompt) -> list[int]:
        return reader.read(one, "input", truncation, prompt=prompt, add_special_tokens=special)

    num_chars = sum(len(one) for one in inputs if isinstance(one, str))
    prompts = await aside(lambda: read_each(read, inputs), num_chars)
    params = PoolingParams(pooling=reader.pooling(config.pooling))
    return responder.requests(body, adapter, prompts, [params] * len(prompts))
