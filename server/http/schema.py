"""Base classes of request bodies: null means absent, nothing is coerced, and no field is dropped silently.

A field is one of five things: declared and honoured; a no-op, which by its meaning cannot change the answer; a hint, which
is dropped and named in a header where it cannot be followed; unsupported, which is a 400 because the answer would be
silently wrong without it; or unknown, which is treated like a hint. Pure data, no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema

from engine.core.errors import shorten
from server.errors import refused_field
from server.openai.limits import Limits

# JSON knows no largest number, Python writes none of more than 4300 digits, and nobody reads a sentence that has one.
Integer = Annotated[int, Field(gt=-(10**40), lt=10**40)]


MAX_FIELDS = 1024  # of one object; no API has a tenth of these, and each unknown one costs memory and a warning


def _fail_fast(schema: Any) -> None:
    """Make every list and dict within a core schema stop at its first fault, so that a million are never made."""
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


class RequestBody(BaseModel):
    """Base of every request body."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    NO_OPS: ClassVar[frozenset[str]] = frozenset()
    # hint -> values that need no mention because they ask for nothing beyond what is done anyway
    HINTS: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    # name -> values that ask for nothing beyond what is done anyway
    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    INSTEAD: ClassVar[Mapping[str, str]] = {}  # unsupported name -> what to do, where that is not to leave it out

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        check_num_fields(data)
        for name in data if isinstance(data, dict) else ():
            neutral = cls.UNSUPPORTED.get(name)
            value = data[name]
            if neutral is not None and value is not None and value not in neutral:
                instead = cls.INSTEAD.get(
                    name, "it would change the answer and this server cannot honour it; leave it out"
                )
                raise refused_field(name, f"is not supported: {instead}.", is_unsupported=True)
        return data

    def ignored_fields(self) -> list[str]:
        """Return the unknown fields and the hints that no model follows, fit for a header."""
        extra = self.model_extra or {}
        names = [
            name
            for name, value in extra.items()
            if name not in self.NO_OPS and name not in self.UNSUPPORTED and value not in self.HINTS.get(name, ())
        ]
        return [ascii(shorten(name))[1:-1] for name in names]

    def dropped_hints(self, limits: Limits) -> list[str]:  # noqa: ARG002 - read by bodies that have such hints
        """Return the declared fields that this model or server cannot follow."""
        return []


class ResponseBody(BaseModel):
    """Base of every answer: only what was set is sent, so a field may be null on purpose or absent."""

    model_config = ConfigDict(ser_json_inf_nan="null")

    def json_bytes(self) -> bytes:
        """This answer as UTF-8 JSON."""
        return self.__pydantic_serializer__.to_json(self, exclude_unset=True)
