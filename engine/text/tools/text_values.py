"""Calls whose parameters are plain text between marks: base of the parsers. Pure.

Parameters become the members of a JSON object, of the types in the tool's schema; strings are passed on piece by piece.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from engine.text.tools.python_literals import WORDS, json_of_literal
from engine.text.tools.tool_format import CallParser, Tools
from engine.text.types import Piece, first_of, held_back

STRING = frozenset({"string"})
_INTEGER = re.compile(r"[-+]?[0-9]{1,400}")


def types_of(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the JSON types that a parameter may have; empty if unknown."""
    properties = parameters.get("properties")
    found: set[str] = set()
    seen: set[str] = set()
    left = [properties.get(name) if isinstance(properties, Mapping) else None]
    while left:
        schema = left.pop()
        if not isinstance(schema, Mapping):
            continue
        found |= types_at(schema) or {type_name(value) for value in values_at(schema) or ()}
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            left.append(resolved(reference, parameters))
        for key in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(key)
            left += parts if isinstance(parts, list) else ()
    return frozenset(found)


def types_at(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names at `type`."""
    found = schema.get("type")
    return {one for one in (found if isinstance(found, list) else [found]) if isinstance(one, str)}


def values_at(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists, or None without a list."""
    named = schema.get("enum")
    if not isinstance(named, list):
        return [schema["const"]] if "const" in schema else None
    return [value for value in named if value == schema.get("const", value)]


def resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema that a reference names."""
    place: Any = root
    for step in reference.removeprefix("#/").split("/"):
        place = place.get(step) if isinstance(place, Mapping) else None
    return place


_TYPES = (
    (type(None), "null"), (bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"),
)  # fmt: skip  # a bool is an int, too


def type_name(value: Any) -> str:
    """Return the JSON type of a value."""
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "object")


def json_of(text: str, types: frozenset[str]) -> str:
    """Return a text as JSON: of the first type that allows it, else any JSON, else a string.

    Types other than string are tried first. If string is the only type, the text is a string. If it is one of them, a
    text that means another number than it spells stays a string: 007, or 1 for true.
    """
    stripped = text.strip()
    if types != STRING:
        readers = {kind: reader for kind, reader in _READERS.items() if kind in types}
        if "string" not in types:
            readers["any"] = _any
        for kind, reader in readers.items():
            found = reader(stripped)
            if found is not None and (
                "string" not in types or kind not in _SPELLED or found.lower() == stripped.lower()
            ):
                return found
    return json.dumps(text, ensure_ascii=False)


def _integer(text: str) -> str | None:
    found = _loaded(text)
    if type_name(found) == "integer":
        return text
    return str(int(text)) if _INTEGER.fullmatch(text) else None


def _number(text: str) -> str | None:
    if type_name(_loaded(text)) in ("integer", "number"):
        return text
    try:
        value = float(text)
    except ValueError:
        return None
    return repr(value) if math.isfinite(value) else None


_BOOLEANS = {"true": "true", "1": "true", "false": "false", "0": "false"}


def _container(bracket: str, text: str) -> str | None:
    """Return an object or array as JSON; models write Python's as well."""
    if text.startswith(bracket) and _loaded(text) is not None:
        return text
    found = json_of_literal(text) if text[:1] in ("{", "[", "(") else None
    return found if found and found.startswith(bracket) else None


def _any(text: str) -> str | None:
    """Return a text that is JSON or a word of Python as JSON."""
    return WORDS.get(text) or (text if _loaded(text) is not None else None)


# In the order in which they are tried.
_READERS: Mapping[str, Callable[[str], str | None]] = {
    "null": lambda text: "null" if text.lower() in ("null", "none") else None,
    "integer": _integer,
    "number": _number,
    "boolean": lambda text: _BOOLEANS.get(text.lower()),
    "object": partial(_container, "{"),
    "array": partial(_container, "["),
}
_SPELLED = frozenset({"integer", "number", "boolean"})


def _loaded(text: str) -> Any:
    """Return the value of JSON, or None for another text or null."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


class TextValuesParser(CallParser):
    """`push` text, `finish` at its end. `tools` has the schemas of parameters."""

    def __init__(self, openings: tuple[str, ...], tools: Tools, ends: Mapping[str, int]) -> None:
        """`ends` are the texts that end a value, and how much of each is read with the value."""
        super().__init__(openings)
        self._tools = tools
        self._ends = ends
        self._parameters: Mapping[str, Any] = {}  # the schema of the call at hand
        self._given: set[str] = set()  # the names of its parameters so far
        self._types: frozenset[str] | None = None  # of the parameter at hand; None for a repeated one, which is skipped
        self._whole = ""  # the value so far, where its JSON is not known before its end

    def finish(self) -> list[Piece]:
        rest = self._buffer
        if self._step == self._value and self._types is not None:
            self._arguments(_escaped(rest) if self._types == STRING else self._whole + rest)
            rest = ""
        elif self._step in (self._members, self._value):
            if self._is_part_of_tag(rest.lstrip()) or self._step == self._value:
                rest = ""
            self._end_call()
        self._buffer = rest
        return super().finish()

    def _members(self) -> bool:
        """Read the next parameter, or the end of the call."""
        raise NotImplementedError

    def _is_part_of_tag(self, text: str) -> bool:
        """Return True if more text may complete a tag within or after a call."""
        raise NotImplementedError

    def _reads_parameter(self, begun: re.Pattern[str]) -> bool:
        """Begin the next parameter, if the text goes on with one; space before it is skipped."""
        self._buffer = self._buffer.lstrip()
        match = begun.match(self._buffer)
        if match is not None:
            self._buffer = self._buffer[match.end() :]
            self._begin_parameter(match[1])
        return match is not None

    def _begin_call(self, name: str) -> None:
        self._begin(name)
        self._parameters, self._given = self._tools.get(name, {}), set()
        self._step = self._members

    def _begin_parameter(self, name: str) -> None:
        """Begin a value; a repeated one is skipped, because the first may have been sent."""
        self._step, self._types, self._whole = self._value, None, ""
        if name not in self._given:
            self._types = types_of(self._parameters, name)
            quote = '"' if self._types == STRING else ""
            begin = "{" if not self._given else ", "
            self._arguments(f"{begin}{json.dumps(name, ensure_ascii=False)}: {quote}")
            self._given.add(name)

    def _value(self) -> bool:
        """Read more of a value, or its end."""
        buffer = self._buffer
        at, end = first_of(buffer, self._ends) or (len(buffer) - held_back(buffer, tuple(self._ends)), "")
        text, self._buffer = buffer[:at], buffer[at + self._ends.get(end, 0) :]
        if end:
            self._step = self._members
        if self._types == STRING:
            self._arguments(_escaped(text) + ('"' if end else ""))
        elif self._types is not None:
            self._whole += text
            self._arguments(json_of(self._whole, self._types) if end else "")
        return bool(end)

    def _end_call(self) -> None:
        self._arguments("}" if self._given else "{}")
        self._step = self._after


def _escaped(text: str) -> str:
    """Return a text as it is written between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
