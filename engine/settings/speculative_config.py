"""Reads --speculative-config, whose keys and values are vLLM's.

A key is served, or a hint that has no effect here and is named at the start, or refused. draft_source.py completes what
the config.json of model and draft decide. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.core.errors import ConfigError
from engine.settings.foreign import ELSEWHERE
from engine.settings.setting import check_key, declared, key, read_object, unknown_key

MAX_DRAFTS = 32
DEFAULT_DRAFTS = 4
_DEFAULT_DRAFTS = {"ngram": DEFAULT_DRAFTS, "suffix": 16}

FLAG = "--speculative-config"


class Method(NamedTuple):
    """A way to draft. A method is one line of METHODS, and what engine/startup/speculation.py loads for it."""

    keys: tuple[str, ...]  # that it takes, beside `method` and `num_speculative_tokens`
    is_text: bool = False  # nothing is loaded
    has_model: bool = False  # beside the one that is served
    check: str = ""  # place of the function that checks config.json of draft and target; "": a model like any other


_MODEL = ("model", "revision", "quantization", "max_model_len")
_SUFFIX = (
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
)
METHODS = {
    "ngram": Method(("prompt_lookup_min", "prompt_lookup_max"), is_text=True),
    "suffix": Method(_SUFFIX, is_text=True),
    "draft_model": Method(_MODEL, has_model=True),
    "mtp": Method(("model", "max_model_len"), check="engine.runtime.models.config_file:check_mtp"),
    "eagle3": Method(_MODEL, has_model=True, check="engine.runtime.models.eagle3_config:check_eagle3"),
}

_CHOICES = f"{', '.join(METHODS)}, or name a model that drafts"

# Keys of vLLM that change speed and nothing else, each with the reason why it has no effect here; and keys, or beginnings of
# keys, that would change the meaning, with the values that do not.
_NO_EFFECT: Mapping[str, str] = ELSEWHERE["speculative_config"]["no_effect"]
_REFUSED: Mapping[str, Mapping[str, Any]] = ELSEWHERE["speculative_config"]["refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """The method that drafts tokens, and how many at most; METHODS says which keys a method takes."""

    method: str = key("")  # "": the config.json of the draft decides
    num_speculative_tokens: int = key(0, at_least=1, at_most=MAX_DRAFTS)  # 0: likewise
    # The shortest n-gram that is searched for in the text so far, and the longest, which is searched for first.
    prompt_lookup_min: int = key(2, at_least=1, at_most=MAX_DRAFTS)
    prompt_lookup_max: int = key(4, at_least=1, at_most=MAX_DRAFTS)
    suffix_decoding_max_tree_depth: int = key(24, at_least=1, at_most=64)  # the most tokens that a match is compared by
    suffix_decoding_max_cached_requests: int = key(10_000, at_least=0, at_most=100_000)  # recent answers, searched too
    suffix_decoding_max_spec_factor: float = key(1.0, at_least=0.1, at_most=32)  # drafts for each token that matched
    suffix_decoding_min_token_prob: float = key(0.1, at_least=0, at_most=1)  # of matches, those that agree with drafts
    model: str | None = key(None)
    revision: str | None = key(None)
    quantization: str = key("auto")
    max_model_len: int | None = key(None, at_least=1)  # longer sequences get no drafts
    hints: tuple[str, ...] = ()  # keys without effect, each with the reason

    @classmethod
    def read(cls, asked: str | Mapping[str, Any]) -> SpeculativeConfig:
        """Return the configuration in JSON, or in the mapping read from it. Raises ConfigError."""
        values, hints, keys = {}, [], {each.name: each for each in declared(cls)}
        for name, value in read_object(FLAG, asked).items():
            if value is None:
                continue
            if name in keys:
                check_key(FLAG, keys[name], value)
                values[name] = value
            elif name in _NO_EFFECT:
                hints.append(f"{name} has no effect: {_NO_EFFECT[name]}")
            else:
                _refuse(name, value, keys)
        method = values["method"] = _method(values)
        own = METHODS[method or "draft_model"].keys
        stray = next((name for name in values if name not in (*_COMMON, *own)), None)
        if stray is not None:
            takers = [name for name, each in METHODS.items() if stray in each.keys]
            raise ConfigError(
                f"{FLAG}: {stray} is for the method {' or '.join(takers)}, and the method is "
                f"{method or 'that of a draft model'}; leave it out."
            )
        return cls(**_filled(values), hints=tuple(hints))

    @property
    def is_text(self) -> bool:
        """Return whether drafts are found in texts: nothing is loaded or computed for them."""
        return self.method in METHODS and METHODS[self.method].is_text

    def check_named(self) -> None:
        """Raise ConfigError if neither a method nor a draft is named, or not the draft that the method needs."""
        if not self.method and self.model is None:
            raise ConfigError(f"{FLAG}: method is missing; choose one of {_CHOICES}.")
        if self.method and METHODS[self.method].has_model and not self.model:
            raise ConfigError(
                f"{FLAG}: the method {self.method} needs a model, such as an id, a folder or a .gguf file."
            )

    def check_vocabulary(self, num_tokens: int, of_target: int) -> None:
        """Raise ConfigError if the draft model has another vocabulary than the model."""
        if num_tokens != of_target:
            raise ConfigError(
                f"{FLAG}: the draft model {self.model} has {num_tokens} tokens and the model {of_target}; choose one of "
                "the same family, whose tokenizer is the same."
            )

    def check_room(self, flag: str, room: int | None) -> None:
        """Raise ConfigError if a token and its drafts exceed a limit on tokens, `room`."""
        if room is not None and room <= self.num_speculative_tokens:
            raise ConfigError(
                f"{FLAG}: num_speculative_tokens is {self.num_speculative_tokens}, and {flag} is {room}; a token and its "
                f"drafts need {1 + self.num_speculative_tokens}, so lower the one or raise the other."
            )


_COMMON = ("method", "num_speculative_tokens")


def _refuse(name: str, value: object, keys: Iterable[str]) -> None:
    """Raise ConfigError for a key without a field, unless the value means the default."""
    found = next((each for start, each in _REFUSED.items() if name == start or name.startswith(start)), None)
    if found is None:
        raise unknown_key(FLAG, name, [*keys, *_NO_EFFECT, *_REFUSED])
    if value not in found["neutral"]:
        raise ConfigError(f"{FLAG}: {name} is {value!r}, which Quire does not serve: {found['why']}; leave it out.")


def _method(values: dict[str, Any]) -> str:
    """Return the method by Quire's name, "" if the draft decides; drops a `model` that only names the method."""
    method = str(values.get("method", ""))
    if method in ("", "ngram", "ngram_gpu") and values.get("model") in ("ngram", "[ngram]"):
        method = values.pop("model").strip("[]")
    if method == "ngram_gpu":
        method = "ngram"
    elif method.endswith("_mtp"):
        method = "mtp"
    if method and method not in METHODS:
        raise ConfigError(f"{FLAG}: method is {method!r}, which Quire does not serve; choose one of {_CHOICES}.")
    return method


def _filled(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with defaults that depend on others. Raises ConfigError for ends in the wrong order."""
    filled = dict(values)
    if "prompt_lookup_max" in values:
        filled.setdefault("prompt_lookup_min", min(2, values["prompt_lookup_max"]))
        least, most = filled["prompt_lookup_min"], filled["prompt_lookup_max"]
        if least > most:
            raise ConfigError(f"{FLAG}: prompt_lookup_min is {least}, more than prompt_lookup_max, which is {most}.")
    elif "prompt_lookup_min" in values:
        filled.setdefault("prompt_lookup_max", max(4, values["prompt_lookup_min"]))
    if values["method"] in _DEFAULT_DRAFTS:
        filled.setdefault("num_speculative_tokens", _DEFAULT_DRAFTS[values["method"]])
    return filled
