"""Reads the arguments of the offline API: the engine's configuration, those of vLLM's LLM included, and those of calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, wraps
from inspect import Parameter, signature
from typing import Any, TypeVar, get_type_hints

from typing_extensions import ParamSpec

from engine.core.errors import ConfigError, InvalidRequestError, QuireError
from engine.core.shown import shorten
from engine.llm.params import SamplingParams
from engine.settings.engine_config import EngineConfig, LoraModule
from engine.settings.foreign import IN_CHECKPOINT, OF_CHECKPOINT, check_same, known_value, refuse, split_file, translate
from engine.settings.setting import declared, expand, names_of, read_number, wrong_kind
from engine.system.regular_file import expanded
from engine.system.similar import closest
from engine.text.channels import CHANNEL_NAMES
from engine.text.reasoning import REASONING_TAGS
from engine.text.tools.formats import TOOL_FORMATS

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)

_OF_THE_DAEMON = frozenset(
    {"host", "port", "served_model_name", "api_key", "log_level", "chat_template_content_format"}
    | {"allowed_media_domains"}
)
_IN_CALLS = {"pooling": "LLM.embed"}  # which take it


def typed(error: type[QuireError]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator of functions that raise `error` for an argument of none of its annotated types."""

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        hints = cache(lambda: get_type_hints(call))

        @wraps(call)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            form = signature(call)
            for name, value in form.bind(*args, **kwargs).arguments.items():
                if value is not None or form.parameters[name].default is Parameter.empty:
                    check_kind(name, value, hints().get(name), error)
            return call(*args, **kwargs)

        return checked

    return decorate


def check_kind(name: str, value: object, annotation: Any, error: type[QuireError] = InvalidRequestError) -> None:
    """Raise `error` for a value of none of the annotated types."""
    if wanted := wrong_kind(annotation, value):
        raise error(f"{name} is {shorten(repr(value))}; {wanted}.")


def engine_config(path: str, given: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration of arguments named as the daemon's flags, or vLLM's. Raises ConfigError.

    An argument of vLLM means what its flag means to `quire serve`: another setting, no effect, or a refusal with the reason.
    """
    settings = declared(EngineConfig)
    known = names_of(settings)
    flags = {name: _plain(value) for name, value in given.items() if value is not None}
    own, foreign = split_file(flags, known)
    translated = translate([each._replace(flag=each.flag.removeprefix("--").replace("-", "_")) for each in foreign])
    values: dict[str, Any] = {}
    together = check_same(translated, own)
    refuse(translated.faults)
    for name, value in together.items():
        if name == "quantization" and value in IN_CHECKPOINT:
            translated.remarks.append(f"quantization {value} ({OF_CHECKPOINT})")
        if name not in known:
            raise ConfigError(_unknown(name, known))
        values.update(expand(settings, name, known_value(name, value)))
    for each in settings:
        if isinstance(value := values.get(each.attribute), str):
            is_auto = each.setting.is_auto and value == "auto"
            values[each.attribute] = None if is_auto else read_number(each.setting.unit, value)
    if translated.remarks:
        logger.info("no effect here: %s", "; ".join(translated.remarks))
    return EngineConfig(model=path, **values)


def adapters_of(modules: Mapping[str, str] | None) -> tuple[LoraModule, ...]:
    """Return the adapters of LLM(lora_modules=...). Raises ConfigError."""
    return tuple(LoraModule(name, str(expanded(path))) for name, path in (modules or {}).items())


def _plain(value: Any) -> Any:
    """Return a torch.dtype as its name, other values as they are."""
    return str(value).removeprefix("torch.") if type(value).__name__ == "dtype" else value


def _unknown(name: str, known: list[str]) -> str:
    if name in _OF_THE_DAEMON:
        return f"{name} is a setting of `quire serve`, not of an engine without HTTP; leave it out."
    if name in _IN_CALLS:
        return f"{name} is an argument of {_IN_CALLS[name]}, not of LLM; give it there."
    close = closest(name, known)
    hint = f"did you mean {close}?" if close else "docs/reference/settings.md lists them."
    return f"{name} is not a setting of the engine; {hint}"


def check_beside_settings(max_logprobs: int, tool_calls: str, reasoning: str, paths: Collection[str | None]) -> None:
    """Raise ConfigError for arguments that no setting of the engine checks. An empty path would be the current folder."""
    if max_logprobs < 0:
        raise ConfigError(f"max_logprobs is {max_logprobs}; it must be at least 0.")
    check_choice("tool_call_parser", tool_calls, TOOL_FORMATS)
    check_choice("reasoning_parser", reasoning, (*REASONING_TAGS, *CHANNEL_NAMES))
    if "" in paths:
        raise ConfigError("tokenizer, chat_template or allowed_local_media_path is ''; give a value, or leave it out.")


def check_choice(name: str, value: str, known: Collection[str], always: Collection[str] = ("auto", "none")) -> None:
    """Raise ConfigError for a value that is none of the known ones."""
    if value not in (*always, *known):
        raise ConfigError(f"{name} is {value!r}; choose {', '.join([*always, *known])}.")


def for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int, priority: Sequence[int] | None = None
) -> list[SamplingParams]:
    """Return one set of parameters for each prompt, with its priority."""
    each = (
        list(params) if isinstance(params, Sequence) else [SamplingParams() if params is None else params] * num_prompts
    )
    if wrong := [one for one in each if not isinstance(one, SamplingParams)]:
        message = f"sampling_params has a {type(wrong[0]).__name__}; give SamplingParams, one for all or one each."
        raise InvalidRequestError(message, param="sampling_params")
    if len(each) != num_prompts:
        raise InvalidRequestError(
            f"There are {num_prompts} prompts and {len(each)} sampling_params; give one for all, or one each.",
            param="sampling_params",
        )
    if priority is None:
        return each
    priority = list(priority)
    if len(priority) != num_prompts:
        raise InvalidRequestError(
            f"There are {num_prompts} prompts and {len(priority)} priorities; give one each.", param="priority"
        )
    each = [params.clone() for params in each]
    for params, value in zip(each, priority, strict=True):
        params.priority = value
    return each
