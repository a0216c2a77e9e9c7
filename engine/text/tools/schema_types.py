"""JSON types of parameters, for formats that write values as plain text. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from engine.text.tools.python_literals import WORDS, json_of_literal

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


def type_name(value: Any) -> str:
    """Return the JSON type of a value."""
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def json_of(text: str, types: frozenset[str]) -> str:
    """Return a text as JSON: of the first type that allows it, else any JSON, else a string.

    Types other than string are tried first. If string is the only type, the text is a string.
    """
    stripped = text.strip()
    if types != STRING:
        readers = [reader for kind, reader in _READERS.items() if kind in types]
        if "string" not in types:
            readers.append(_any)
        found = next((value for reader in readers if (value := reader(stripped)) is not None), None)
        if found is not None:
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


def _boolean(text: str) -> str | None:
    return {"true": "true", "1": "true", "false": "false", "0": "false"}.get(text.lower())


def _null(text: str) -> str | None:
    return "null" if text.lower() in ("null", "none") else None


def _object(text: str) -> str | None:
    return _container(text, "{")


def _array(text: str) -> str | None:
    return _container(text, "[")


def _container(text: str, bracket: str) -> str | None:
    """Return an object or array as JSON; models write Python's as well."""
    if text.startswith(bracket) and _loaded(text) is not None:
        return text
    found = json_of_literal(text) if text[:1] in ("{", "[", "(") else None
    return found if found and found.startswith(bracket) else None


def _any(text: str) -> str | None:
    """Return a text that is JSON or a word of Python as JSON."""
    return WORDS.get(text) or (text if _loaded(text) is not None else None)


# In the order in which they are tried.
_READERS = {
    "null": _null,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "object": _object,
    "array": _array,
}


def _loaded(text: str) -> Any:
    """Return the value of JSON, or None for another text or null."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
