"""The offline API's sampling parameters: the request fields as arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.text.fields.base import Count, checked, plain_errors
from engine.text.fields.chat import ChatFields
from engine.text.fields.sampling import SamplingFields


class SamplingParams(SamplingFields, extra="forbid"):
    """How to choose tokens and when to stop, as in /v1/completions.

    `max_tokens` is 16 unless given; None is as many as the context holds. Other Nones are the
    daemon's defaults. A `seed` of None draws a new one for every prompt. `logprobs` counts alternatives.
    `structured_outputs` ({"json": ...}, {"regex": ...}, {"choice": [...]}, {"grammar": ...}) and `response_format` are the HTTP API's objects.
    """

    logprobs: Count | None = None

    if not TYPE_CHECKING:  # editors and type checkers see the fields as arguments

        def __init__(self, **values: Any) -> None:
            """Raises InvalidRequestError for a value out of range."""
            with plain_errors():
                super().__init__(**{"max_tokens": 16} | {name: _as_json(value) for name, value in values.items()})

    def to_chat(self, conversation: Mapping[str, Any]) -> ChatFields:
        """Return the checked fields of a conversation. Raises InvalidRequestError."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        values |= {"logprobs": self.logprobs is not None, "top_logprobs": self.logprobs}
        return checked(ChatFields, {**values, **conversation})


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): inner for name, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value
