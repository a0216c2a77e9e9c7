"""The body of POST /v1/chat/completions: the fields of a conversation, and those of other servers' APIs. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator

from engine.core.errors import InvalidRequestError
from engine.text.fields.base import Integer
from engine.text.fields.chat import ChatFields
from server.openai.sampling import HINTS, INSTEAD, NO_OPS, UNSUPPORTED, SamplingBody


class ChatBody(SamplingBody, ChatFields):
    """The request, and the form that the other APIs with messages are translated to."""

    NO_OPS: ClassVar[frozenset[str]] = NO_OPS | {"prediction"}
    HINTS: ClassVar[Mapping[str, tuple[Any, ...]]] = {**HINTS, "verbosity": ("medium",)}
    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **UNSUPPORTED,
        **dict.fromkeys(("audio", "functions", "moderation", "web_search_options"), ()),
        "best_of": (1,),
        "echo": (False,),
        "function_call": ("none",),
        "modalities": (["text"],),
    }
    INSTEAD: ClassVar[Mapping[str, str]] = {
        **INSTEAD,
        "best_of": "answers are ranked by /v1/completions only; send n to have several",
    }

    max_completion_tokens: Integer | None = Field(None, ge=1)
    max_tokens: Integer | None = Field(None, ge=1)
    include_reasoning: bool = True

    @model_validator(mode="after")
    def _check_max_tokens(self) -> ChatBody:
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise InvalidRequestError(
                f"max_tokens is {both[0]} and max_completion_tokens {both[1]}; they mean the same, send one.",
                param="max_tokens",
            )
        return self

    @property
    def asked_max_tokens(self) -> int | None:
        """The most tokens of an answer, where the request names them."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
