"""Base of request objects: null is absent, nothing is coerced or lost.

A field is one of five things: declared and honoured; a no-op, which by its meaning cannot change the answer; a hint, which
is dropped, and named in a header, where it cannot be followed; unsupported, which is refused because the answer would be
silently wrong without it; or unknown, which is treated as a hint. Pure data, no HTTP: the offline API declares its
fields with the same classes, so both validate by the same rules and report the same sentences.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from engine.core.errors import InvalidRequestError, shorten
from engine.system.similar import closest
from engine.text.chat.limits import ModelLimits

# JSON has no largest number, but Python writes none of more than 4300 digits, and an error message should not hold one.
Integer = Annotated[int, Field(gt=-(10**40), lt=10**40)]
Count = Annotated[int, Field(ge=0, lt=10**40)]

MAX_FIELDS = 1024  # of one object; no API has a tenth of these, and each unknown one costs memory and a warning
MAX_FAULTS = 10  # in one message

_PROMPT_FIELDS = ("messages", "prompt", "input")  # the prompt's name differs between endpoints
_JSON_TYPES = ((str, "a string"), (list, "a list"), (dict, "an object"))


def _fail_fast(schema: Any) -> None:
    """Make every list and dict within a core schema stop at its first fault."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            schema["fail_fast"] = True
        for inner in schema.values():
            _fail_fast(inner)
    elif isinstance(schema, list):
        for inner in schema:
            _fail_fast(inner)


def check_num_fields(data: Any) -> None:
    """Raise ValueError for an object with more fields than MAX_FIELDS."""
    if isinstance(data, dict) and len(data) > MAX_FIELDS:
        raise ValueError(f"the object has {len(data)} fields; send at most {MAX_FIELDS}")


def refused_field(name: str, reason: str, *, is_unsupported: bool = False) -> PydanticCustomError:
    """Return the error for a field that a validator refuses; "" is the value itself."""
    kind = "unsupported_parameter" if is_unsupported else "refused_field"
    return PydanticCustomError(kind, "{name} {reason}", {"name": name, "reason": reason})


class Refused(NamedTuple):
    """A field that is refused, unless its value asks for what is done anyway."""

    neutral: tuple[Any, ...] = ()
    instead: str = ""  # what to do, where that is not to leave it out


class RequestBody(BaseModel):
    """Base of every request body, and of every object in one."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    NO_OPS: ClassVar[frozenset[str]] = frozenset()
    # hint -> values that need no mention because they ask for nothing beyond what is done anyway
    HINTS: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    UNSUPPORTED: ClassVar[Mapping[str, Refused]] = {}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _take_fields(cls, data: Any) -> Any:
        """Return the fields that are not null. Raises for one that is not supported."""
        check_num_fields(data)
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        for name, refused in cls.UNSUPPORTED.items():
            if name in given and given[name] not in refused.neutral:
                instead = refused.instead or "it would change the answer and this server cannot honour it; leave it out"
                raise refused_field(name, f"is not supported: {instead}.", is_unsupported=True)
        return given

    def ignored_fields(self) -> list[str]:
        """Return the unknown fields, also of objects in fields, and the hints that no model follows, fit for a header."""
        extra = self.model_extra or {}
        names = [
            name
            for name, value in extra.items()
            if name not in self.NO_OPS and name not in self.UNSUPPORTED and value not in self.HINTS.get(name, ())
        ]
        parts = [(name, value) for name, value in self.__dict__.items() if isinstance(value, RequestBody)]
        nested = [f"{at}.{name}" for at, part in parts for name in part.ignored_fields()]
        return [ascii(shorten(name))[1:-1] for name in names] + nested

    def dropped_hints(self, limits: ModelLimits) -> list[str]:  # noqa: ARG002 - for bodies that have such hints
        """Return the declared fields that this model or server cannot follow."""
        return []


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
