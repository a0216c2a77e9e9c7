"""JSON types of parameters, for formats that write values as plain text. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

STRING = frozenset({"string"})
_WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's words, which models write


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
    """Return a text as JSON: its value, if the types allow it, else a string."""
    stripped = text.strip()
    spelled = _WORDS.get(stripped, stripped)
    try:
        found: str | None = type_name(json.loads(spelled, parse_constant=_refuse))
    except (ValueError, RecursionError):
        found = None
    fits = found in types or (found == "integer" and "number" in types)
    if types != STRING and found and (fits or "string" not in types):
        return spelled
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
