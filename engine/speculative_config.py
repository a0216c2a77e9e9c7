"""Reads --speculative-config, whose keys are vLLM's where they mean the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from engine.core.errors import ConfigError
from engine.setting import read_object, unknown_key

METHODS = ("ngram", "draft_model")
MAX_DRAFTS = 32

_FLAG = "--speculative-config"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are drafted, and how many at most. `model` and below are for draft_model, prompt_lookup_* for ngram."""

    method: str
    num_speculative_tokens: int = 4
    prompt_lookup_min: int = 2  # shortest n-gram that is searched for in the text so far
    prompt_lookup_max: int = 4  # longest, which is searched for first
    model: str | None = None
    revision: str | None = None
    quantization: str = "auto"

    @classmethod
    def read(cls, asked: str | Mapping[str, Any]) -> SpeculativeConfig:
        """Return the configuration in JSON, or in what was read from it. Raises ConfigError."""
        values = read_object(_FLAG, asked)
        types = {field.name: field.type for field in fields(cls)}
        for key, value in values.items():
            if key not in types:
                raise unknown_key(_FLAG, key, types)
            wanted = int if types[key] == "int" else str
            if type(value) is not wanted:
                kind = "a whole number" if wanted is int else "a string"
                raise ConfigError(f"{_FLAG}: {key} is {value!r}; it must be {kind}.")
        method = values.get("method") or ("draft_model" if "model" in values else None)
        if method not in METHODS:
            raise ConfigError(f"{_FLAG}: method is {method!r}; choose one of {', '.join(METHODS)}.")
        own = {"ngram": ("prompt_lookup_",), "draft_model": ("model", "revision", "quantization")}
        other = METHODS[1 - METHODS.index(method)]
        stray = next((key for key in values if key.startswith(own[other])), None)
        if stray is not None:
            raise ConfigError(f"{_FLAG}: {stray} is for the method {other}, and the method is {method}; leave it out.")
        return cls(**{**_filled(values), "method": method})

    def with_model(self, path: str) -> dict[str, Any]:
        """Return the configuration as --speculative-config, with a local draft model."""
        return {
            "method": self.method,
            "num_speculative_tokens": self.num_speculative_tokens,
            "model": path,
            "quantization": self.quantization,
        }

    def check_vocabulary(self, num_tokens: int, of_target: int) -> None:
        """Raise ConfigError if the draft model has another vocabulary than the model."""
        if num_tokens != of_target:
            raise ConfigError(
                f"{_FLAG}: the draft model {self.model} has {num_tokens} tokens and the model {of_target}; choose one of "
                "the same family, whose tokenizer is the same."
            )

    def check_room(self, flag: str, room: int | None) -> None:
        """Raise ConfigError if a token and its drafts exceed a limit on tokens, `room`."""
        if room is not None and room <= self.num_speculative_tokens:
            raise ConfigError(
                f"{_FLAG}: num_speculative_tokens is {self.num_speculative_tokens}, and {flag} is {room}; a token and its "
                f"drafts need {1 + self.num_speculative_tokens}, so lower the one or raise the other."
            )

    def __post_init__(self) -> None:
        for name, most in (
            ("num_speculative_tokens", MAX_DRAFTS),
            ("prompt_lookup_max", MAX_DRAFTS),
            ("prompt_lookup_min", self.prompt_lookup_max),
        ):
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise ConfigError(f"{_FLAG}: {name} is {value}; it must be from 1 to {most}.")
        if self.method == "draft_model" and not self.model:
            raise ConfigError(
                f"{_FLAG}: the method draft_model needs a model, such as an id, a folder or a .gguf file."
            )


def _filled(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with the other end of prompt_lookup_* adjusted, where one was given."""
    filled = dict(values)
    if "prompt_lookup_max" in values:
        filled.setdefault("prompt_lookup_min", min(2, values["prompt_lookup_max"]))
    elif "prompt_lookup_min" in values:
        filled.setdefault("prompt_lookup_max", max(4, values["prompt_lookup_min"]))
    return filled
