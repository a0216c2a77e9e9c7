"""What --speculative-config asks for, checked. vLLM's keys, where they mean the same."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from engine.core.errors import ConfigError

METHODS = ("ngram", "draft_model")
MAX_DRAFTS = 32

_FLAG = "--speculative-config"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Who drafts, and how much at most. `model` and what follows are for draft_model, prompt_lookup_* for ngram."""

    method: str
    num_speculative_tokens: int = 4
    prompt_lookup_min: int = 2  # tokens that have to agree with an earlier place ...
    prompt_lookup_max: int = 4  # ... and that are tried first
    model: str | None = None
    revision: str | None = None
    quantization: str = "auto"

    @classmethod
    def read(cls, asked: str | Mapping[str, Any]) -> SpeculativeConfig:
        """From JSON or what has been read from it. Raises ConfigError."""
        values = _parse(asked) if isinstance(asked, str) else asked
        if not isinstance(values, Mapping):
            raise ConfigError(f"""{_FLAG} is {asked!r}; it must be a JSON object, such as {{"method": "ngram"}}.""")
        types = {field.name: field.type for field in fields(cls)}
        for key, value in values.items():
            if key not in types:
                close = difflib.get_close_matches(str(key), types, 1)
                hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(types)}."
                raise ConfigError(f"{_FLAG} has the key {key!r}, which nobody knows; {hint}")
            wanted = int if types[key] == "int" else str
            if type(value) is not wanted:
                what = "a whole number" if wanted is int else "a string"
                raise ConfigError(f"{_FLAG}: {key} is {value!r}; it must be {what}.")
        method = values.get("method") or ("draft_model" if "model" in values else None)
        if method not in METHODS:
            raise ConfigError(f"{_FLAG}: method is {method!r}; choose one of {', '.join(METHODS)}.")
        own = {"ngram": ("prompt_lookup_",), "draft_model": ("model", "revision", "quantization")}
        other = METHODS[1 - METHODS.index(method)]
        stray = next((key for key in values if key.startswith(own[other])), None)
        if stray is not None:
            raise ConfigError(f"{_FLAG}: {stray} is for the method {other}, and the method is {method}; leave it out.")
        return cls(**{**_filled(values), "method": method})

    def check_vocabulary(self, num_tokens: int, of_target: int) -> None:
        """Raise ConfigError if the draft model's tokens cannot be those of the model it drafts for."""
        if num_tokens != of_target:
            raise ConfigError(
                f"{_FLAG}: the draft model {self.model} has {num_tokens} tokens and the model {of_target}; choose one of "
                "the same family, whose tokenizer is the same."
            )

    def check_room(self, flag: str, room: int | None) -> None:
        """Raise ConfigError if a token and its drafts are more than a step or a context may hold."""
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


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{_FLAG} is {text!r}, which is not JSON: {error}.") from None


def _filled(values: Mapping[str, Any]) -> dict[str, Any]:
    """Where only one end of prompt_lookup_* was given, the other yields to it."""
    filled = dict(values)
    if "prompt_lookup_max" in values:
        filled.setdefault("prompt_lookup_min", min(2, values["prompt_lookup_max"]))
    elif "prompt_lookup_min" in values:
        filled.setdefault("prompt_lookup_max", max(4, values["prompt_lookup_min"]))
    return filled
