"""The sentences for what validation finds, of every API and of the offline one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from engine.core.errors import InvalidRequestError, shorten
from engine.system.similar import closest
from engine.text.fields.body import RequestBody

MAX_FAULTS = 10  # in one message
_PROMPT_FIELDS = ("messages", "prompt", "input")  # the prompt's name differs between endpoints
_JSON_TYPES = ((str, "a string"), (list, "a list"), (dict, "an object"))

Body = TypeVar("Body", bound=RequestBody)


def checked(kind: type[Body], values: Mapping[str, Any]) -> Body:
    """Return a body made of Python values. Raises InvalidRequestError."""
    with plain_errors():
        return kind.model_validate(values)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise what pydantic finds as an InvalidRequestError."""
    try:
        yield
    except ValidationError as error:
        message, param = describe(error)
        raise InvalidRequestError(message, param=param) from error


def describe(error: ValidationError) -> tuple[str, str | None]:
    """Return the message for a validation error, and the field that it names first."""
    faults = error.errors(include_url=False)
    fields, lines = zip(*map(_describe_fault, faults[:MAX_FAULTS]), strict=True)
    more = [f"and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
    return "; ".join([*lines, *more]), fields[0] or None


def _describe_fault(fault: ErrorDetails) -> tuple[str, str]:
    """Return the field and the sentence."""
    path = list(map(str, fault["loc"]))
    context = fault.get("ctx", {})
    if "reason" in context:  # of refused_field
        param = shorten(".".join([*path, context["name"]] if context["name"] else path))
        return param, f"{param} {context['reason']}"
    param = shorten(".".join(path))
    message = shorten(_words(fault)) + _culprit(fault)
    return param, f"{param}: {message}" if param else message


def _words(fault: ErrorDetails) -> str:
    """Return pydantic's message without names of Python classes."""
    if fault["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return "Input should be an object"
    return fault["msg"].removeprefix("Value error, ").replace(" after validation", "")


def _culprit(fault: ErrorDetails) -> str:
    """Return the offending number or type, but never text, which may be a secret."""
    value = fault["input"]
    if fault["type"] == "missing":
        return _instead(str(fault["loc"][-1]), value)
    if fault["type"] == "value_error":
        return ""
    if isinstance(value, int | float):
        return f", not {shorten(json.dumps(value))}"
    if not fault["type"].endswith("_type"):
        return ""
    return next((f", not {name}" for kind, name in _JSON_TYPES if isinstance(value, kind)), "")


def _instead(name: str, given: Any) -> str:
    """Return a hint at the given field that the missing one was meant to be, or ""."""
    names = [each for each in given if isinstance(each, str)] if isinstance(given, dict) else []
    same_meaning = [each for each in _PROMPT_FIELDS if each in names and name in _PROMPT_FIELDS]
    close = closest(name, names) or next(iter(same_meaning), "")
    return f"; {shorten(close)} was sent instead" if close else ""
