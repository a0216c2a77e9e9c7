"""Base of request objects: null is absent, nothing is coerced or lost.

A field is one of five things: declared and honoured; a no-op, which by its meaning cannot change the answer; a hint, which
is dropped, and named in a header, where it cannot be followed; unsupported, which is refused because the answer would be
silently wrong without it; or unknown, which is treated as a hint. Pure data, no HTTP: the offline API declares its
fields with the same classes, so both validate by the same rules and report the same sentences.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from engine.core.errors import InvalidRequestError, UnsupportedError
from engine.core.shown import shorten
from engine.system.similar import closest
from engine.text.chat.limits import ModelLimits

MAX_FAULTS = 10  # in one message
_PROMPT_FIELDS = ("messages", "prompt", "input")  # the prompt's name differs between endpoints
_NAMES: Mapping[type, str] = {str: "a string", list: "a list", dict: "an object"}

Body = TypeVar("Body", bound="RequestBody")


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
    if fault["type"] in ("value_error", "extra_forbidden"):
        return ""
    if isinstance(value, int | float):
        return f", not {shorten(json.dumps(value))}"
    if not fault["type"].endswith("_type"):
        return ""
    return f", not {_NAMES[type(value)]}" if type(value) in _NAMES else ""


def or_text(expand: Callable[[str], Any], kind: type = list) -> Callable[[Any], Any]:
    """Return what reads a list or an object, of which a text is the short form that `expand` expands. Raises for others."""

    def read(value: Any) -> Any:
        if isinstance(value, str):
            return expand(value)
        if not isinstance(value, kind):
            raise neither_text_nor(kind)
        return value

    return read


def neither_text_nor(kind: type) -> PydanticCustomError:
    """Return the error for a value that is neither a text nor a list or an object."""
    return PydanticCustomError("short_type", "Input should be a string or {kind}", {"kind": _NAMES[kind]})


def _instead(name: str, given: Any) -> str:
    """Return a hint at the given field that the missing one was meant to be, or ""."""
    names = [each for each in given if isinstance(each, str)] if isinstance(given, dict) else []
    same_meaning = [each for each in _PROMPT_FIELDS if each in names and name in _PROMPT_FIELDS]
    close = closest(name, names) or next(iter(same_meaning), "")
    return f"; {shorten(close)} was sent instead" if close else ""


# JSON has no largest number, but Python writes none of more than 4300 digits, and an error message should not hold one.
Integer = Annotated[int, Field(gt=-(10**40), lt=10**40)]
Count = Annotated[int, Field(ge=0, lt=10**40)]

MAX_FIELDS = 1024  # of one object; no API has a tenth of these, and each unknown one costs memory and a warning


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


def _without_hosted(data: dict[str, Any], own: Sequence[str | None]) -> dict[str, Any]:
    """Return a body without a provider's tools, if some of the types `own` remain.

    The model can do without them. Each dropped type remains as an unknown field, which is reported to the client.
    """
    tools = data.get("tools")
    if not isinstance(tools, list):
        return data
    kinds = [tool.get("type") if isinstance(tool, dict) else None for tool in tools]
    hosted = {kind for kind in kinds if isinstance(kind, str) and kind not in own}
    if not hosted:
        return data
    kept = [tool for tool, kind in zip(tools, kinds, strict=True) if kind not in hosted]
    if not kept:
        wanted = next(kind for kind in own if kind is not None)
        raise UnsupportedError(
            "tools",
            f"nothing here runs tools of type {shorten(min(hosted))!r}, and no others stand beside them; send tools of "
            f"type {wanted!r}, which the client runs.",
        )
    return {**data, "tools": kept, **{f"tools.{kind}": True for kind in sorted(hosted)}}


def refused_field(name: str, reason: str, *, is_unsupported: bool = False) -> PydanticCustomError:
    """Return the error for a field that a validator refuses; "" is the value itself."""
    kind = "unsupported_parameter" if is_unsupported else "refused_field"
    return PydanticCustomError(kind, "{name} {reason}", {"name": name, "reason": reason})


class Refused(NamedTuple):
    """A field that is refused, unless its value asks for what is done anyway."""

    neutral: tuple[Any, ...] = ()
    instead: str = ""  # what to do, where that is not to leave it out


IdleFields = Mapping[str, Callable[[Any, ModelLimits], bool]]


class RequestBody(BaseModel):
    """Base of every request body, and of every object in one."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False, defer_build=True)

    NO_OPS: ClassVar[frozenset[str]] = frozenset()
    # hint -> values that need no mention because they ask for nothing beyond what is done anyway
    HINTS: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    UNSUPPORTED: ClassVar[Mapping[str, Refused]] = {}
    # the types of tools that the client runs, where the body has tools
    OWN_TOOLS: ClassVar[Sequence[str | None]] = ()
    # whether unknown fields are for the chat template to read
    FOR_TEMPLATE: ClassVar[bool] = False
    # declared field -> whether a body that sets it sets it in vain, with this model and these settings
    IDLE: ClassVar[IdleFields] = {}

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
        return _without_hosted(given, cls.OWN_TOOLS) if cls.OWN_TOOLS and "tools" in given else given

    def without_effect(self, limits: ModelLimits) -> list[str]:
        """Return the fields that change nothing here, unknown ones and hints."""
        return [*self.ignored_fields(), *self.dropped_hints(limits)]

    def ignored_fields(self) -> list[str]:
        """Return the unknown fields, also of objects within, and the hints that no model follows, fit for a header."""
        extra = {} if self.FOR_TEMPLATE else self.model_extra or {}
        names = [
            name
            for name, value in extra.items()
            if name not in self.NO_OPS and name not in self.UNSUPPORTED and value not in self.HINTS.get(name, ())
        ]
        shown = [ascii(shorten(name))[1:-1] for name in names]
        for at, value in self.__dict__.items():
            parts = value if isinstance(value, list) else [value]
            if parts and isinstance(parts[0], RequestBody):
                shown += [f"{at}.{name}" for part in parts for name in part.ignored_fields()]
        return list(dict.fromkeys(shown))

    def dropped_hints(self, limits: ModelLimits) -> list[str]:
        """Return the declared fields that this model or server cannot follow."""
        given = self.model_fields_set
        return [name for name, idle in self.IDLE.items() if name.partition(".")[0] in given and idle(self, limits)]
