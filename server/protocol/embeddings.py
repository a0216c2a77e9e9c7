"""POST /v1/embeddings: its request and its answer. A vector is cut to `dimensions`, then made one long."""

from __future__ import annotations

import math
from array import array
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from engine.core.errors import InvalidRequestError
from server.protocol.base import Integer, ResponseBody
from server.protocol.completions import Prompts
from server.protocol.reading import ReadingBody, check_num_inputs
from server.protocol.usage import Usage


class EmbeddingBody(ReadingBody):
    """The request. `input` may be all that a completion's prompt may be."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **ReadingBody.UNSUPPORTED,
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "messages": (),
        "normalize": (True,),
        "use_activation": (True,),
    }
    INSTEAD: ClassVar[Mapping[str, str]] = {
        "messages": "send input; /tokenize gives the token ids of messages, which it may have",
    }

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Integer | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _check_size(self) -> EmbeddingBody:
        check_num_inputs(len(self.input), "input")
        return self

    def shape(self, index: int, pooled: Sequence[float]) -> Embedding:
        """One input's vector, as asked for. Raises InvalidRequestError if it has not so many dimensions."""
        dimensions = len(pooled) if self.dimensions is None else self.dimensions
        if dimensions > len(pooled):
            raise InvalidRequestError(
                f"dimensions is {dimensions}, but this model's vectors have {len(pooled)}; lower it.",
                param="dimensions",
            )
        vector = unit_vector(pooled[:dimensions])
        if self.encoding_format == "float":
            return Embedding(object="embedding", index=index, embedding=vector.tolist())
        return Embedding(object="embedding", index=index, embedding=b64encode(vector.tobytes()).decode())


def unit_vector(values: Sequence[float]) -> array[float]:
    """The same direction, of length one, in float32. Nothing at all stays that."""
    length = math.hypot(*values) or 1.0
    return array("f", [value / length for value in values])


class Embedding(ResponseBody):
    object: str
    index: int
    embedding: list[float] | str


class Embeddings(ResponseBody):
    """The answer, one entry an input, in order."""

    object: str
    model: str
    data: list[Embedding]
    usage: Usage
