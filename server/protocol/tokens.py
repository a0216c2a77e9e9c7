"""POST /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator

from engine.core.errors import InvalidRequestError
from server.protocol.base import RequestBody, ResponseBody
from server.protocol.conversation import Conversation, Message


class TokenizeBody(Conversation):
    """A `prompt` or `messages`, never both. Special tokens are added to a prompt, not to a rendered conversation."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"chat_template": ()}

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] = Field(default_factory=list)
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_source(self) -> TokenizeBody:
        if (self.prompt is None) == (not self.messages):
            raise InvalidRequestError("Send either prompt or messages.", param="prompt")
        return self


class Tokenized(ResponseBody):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(RequestBody):
    model: str | None = None
    tokens: list[int]


class Detokenized(ResponseBody):
    prompt: str
