"""POST /v1/embeddings. A vector is cut to `dimensions`, then normalised."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from engine.core.types import Pooling, SamplingParams
from engine.text.fields.body import Integer, Refused
from engine.text.prompt_results import unit_vector
from server.answers.parts import InConfig, InModel, InResponder
from server.answers.respond import with_timings
from server.http.bodies import json_body
from server.http.openapi import answers
from server.http.threads import run_slowly
from server.openai.prompt_only import PromptOnlyBody, check_num_inputs, shape_each
from server.openai.prompts import Prompts, prompt_ids
from server.protocol.documents import ResponseBody, Usage

router = APIRouter()

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
