"""What a caller of the offline API may ask for, checked by the HTTP API's own models. Pure, any thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from engine.core.errors import InvalidRequestError
from server.errors import ApiError, to_api_error
from server.http.schema import Integer
from server.openai.chat_body import ChatBody
from server.openai.sampling import SamplingBody

Body = TypeVar("Body", bound=BaseModel)


class OfflineBody(SamplingBody):
    """The HTTP API's fields, with its checks."""

    logprobs: Integer | None = Field(None, ge=0)


class OfflineChatBody(ChatBody):
    """The HTTP API's conversation; `max_tokens` 0 scores it."""

    max_tokens: Integer | None = Field(None, ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop: names, ranges and meanings of /v1/completions, checked at once.

    `max_tokens` None is as many as the context holds; other Nones are the defaults of the daemon. A `seed` of None
    draws another one for every prompt. `structured_outputs` ({"json": ...}, {"regex": ...}, {"choice": [...]},
    {"grammar": ...}) and `response_format` are the HTTP API's objects.
    """

    n: int = 1
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    deadline_ms: int | None = None
    max_queue_ms: int | None = None
    structured_outputs: Mapping[str, Any] | None = None
    response_format: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequestError for a value out of range."""
        self.to_body()

    def to_body(self) -> OfflineBody:
        """The same as the HTTP API's model."""
        return checked(OfflineBody, self._values())

    def to_chat(self, conversation: Mapping[str, Any]) -> OfflineChatBody:
        """The same as the HTTP API's model of a conversation, whose own fields are given."""
        values = self._values()
        num_top = values.pop("logprobs")
        values |= {"logprobs": num_top is not None, "top_logprobs": num_top}
        return checked(OfflineChatBody, {**values, **conversation})

    def _values(self) -> dict[str, Any]:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            if isinstance(values[name], tuple):
                values[name] = list(values[name])
        for name in ("structured_outputs", "response_format"):
            if isinstance(values[name], Mapping):
                values[name] = dict(values[name])
        if isinstance(self.logit_bias, Mapping):
            values["logit_bias"] = {str(token_id): bias for token_id, bias in self.logit_bias.items()}
        return values


def checked(kind: type[Body], values: Mapping[str, Any]) -> Body:
    """A body of the HTTP API made of Python values. Raises InvalidRequestError, in its words."""
    with in_words():
        return kind.model_validate(values)


@contextmanager
def in_words() -> Iterator[None]:
    """What the HTTP API refuses, as an InvalidRequestError."""
    try:
        yield
    except (ValidationError, ApiError) as error:
        told = to_api_error(error)
        raise InvalidRequestError(told.message, param=told.param) from error
