"""The offline API's sampling parameters: the request fields as arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import Self, TypedDict

from engine.core.errors import InvalidRequestError
from engine.llm.unserved import SAMPLING_PARAMS, asks_for_nothing
from engine.text.fields.body import Count, checked, plain_errors
from engine.text.fields.chat import ChatFields
from engine.text.fields.sampling import SamplingFields


class StructuredOutputsParams(TypedDict, total=False):
    """The form of an answer; exactly one key. vLLM's name for the object of the field `structured_outputs`."""

    json: str | dict[str, Any]
    regex: str
    choice: list[str]
    grammar: str
    json_object: bool
    structural_tag: str


class SamplingParams(SamplingFields, extra="forbid", frozen=False):
    """How to choose tokens and when to stop, as in /v1/completions.

    `max_tokens` is 16 unless given; None is as many as the context holds. Other Nones are the
    daemon's defaults. A `seed` of None draws a new one for every prompt. `logprobs` counts alternatives.
    `structured_outputs` ({"json": ...}, {"regex": ...}, {"choice": [...]}, {"grammar": ...}) and `response_format` are the HTTP API's objects.
    """

    logprobs: Count | None = None

    if not TYPE_CHECKING:  # editors and type checkers see the fields as arguments

        def __init__(self, **values: Any) -> None:
            """Raises InvalidRequestError for a value out of range."""
            own = {name: value for name, value in values.items() if not _is_foreign(name, value)}
            with plain_errors():
                super().__init__(**{"max_tokens": 16} | {name: _as_json(value) for name, value in own.items()})

        def __setattr__(self, name: str, value: Any) -> None:
            """Raises InvalidRequestError for a value out of range."""
            values = {each: getattr(self, each) for each in type(self).model_fields}
            made = type(self)(**{**values, name: value})
            object.__setattr__(self, "__dict__", made.__dict__)
            object.__setattr__(self, "__pydantic_fields_set__", made.model_fields_set)

    def clone(self) -> Self:
        """Return a copy, as vLLM's method does."""
        return self.model_copy(deep=True)

    def to_chat(self, conversation: Mapping[str, Any]) -> ChatFields:
        """Return the checked fields of a conversation. Raises InvalidRequestError."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        values |= {"logprobs": self.logprobs is not None, "top_logprobs": self.logprobs}
        return checked(ChatFields, {**values, **conversation})


def _is_foreign(name: str, value: Any) -> bool:
    """Return whether a parameter of vLLM's asks for nothing. Raises InvalidRequestError for one that does."""
    if name == "logprobs" and value == -1:
        raise InvalidRequestError(
            "logprobs is -1, all tokens; give a number of alternatives, at most max_logprobs of LLM.", param=name
        )
    row = SAMPLING_PARAMS.get(name)
    if row is not None and not asks_for_nothing(row, value):
        raise InvalidRequestError(f"{name} is not a parameter here; {row['instead']}.", param=name)
    return row is not None


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): inner for name, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value
