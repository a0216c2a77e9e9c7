"""The offline API's sampling parameters, checked by engine/text's fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from engine.text.fields.base import Count, checked
from engine.text.fields.chat import ChatFields
from engine.text.fields.sampling import SamplingFields


class OfflineFields(SamplingFields):
    """The fields of a prompt; `logprobs` counts alternatives."""

    logprobs: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop, as in /v1/completions.

    `max_tokens` None is as many as the context holds; other Nones are the daemon's defaults. A `seed` of None draws a
    new one for every prompt. `structured_outputs` ({"json": ...}, {"regex": ...}, {"choice": [...]},
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
        self.to_fields()

    def to_fields(self) -> OfflineFields:
        """Return the checked fields of a prompt."""
        return checked(OfflineFields, self._values())

    def to_chat(self, conversation: Mapping[str, Any]) -> ChatFields:
        """Return the checked fields of a conversation. Raises InvalidRequestError."""
        values = self._values()
        num_top = values.pop("logprobs")
        values |= {"logprobs": num_top is not None, "top_logprobs": num_top}
        return checked(ChatFields, {**values, **conversation})

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
