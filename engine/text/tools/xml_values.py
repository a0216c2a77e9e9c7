"""What a parameter of a call in XML means: its text is a string or a JSON value, as the tool's schema has it. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_WORDS = {"True": "true", "False": "false", "None": "null"}  # as Python has them, and models write them
STRING = frozenset({"string"})


def kinds_of(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """The types of JSON that a parameter may have; empty where the schema does not tell."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return frozenset(_kinds(schema, parameters))


def json_of(text: str, kinds: frozenset[str]) -> str:
    """The text as JSON: what it spells, if a parameter of these kinds may be that, else a string."""
    if kinds == STRING:
        return json.dumps(text, ensure_ascii=False)
    stripped = text.strip()
    spelled = _WORDS.get(stripped, stripped)
    kind = _kind_of_text(spelled)
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    if kind is not None and (fits or "string" not in kinds):
        return spelled
    return json.dumps(text, ensure_ascii=False)


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """What stands at `type`."""
    kind = schema.get("type")
    return {one for one in (kind if isinstance(kind, list) else [kind]) if isinstance(one, str)}


def _kinds(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Of all alternatives together, each reference looked up once: they may go in circles, and multiply."""
    found: set[str] = set()
    seen: set[str] = set()
    left = [schema]
    while left:
        schema = left.pop()
        if not isinstance(schema, Mapping):
            continue
        kinds = types_of(schema)
        if not kinds and isinstance(schema.get("enum"), list):
            kinds = {kind_of(value) for value in schema["enum"]}
        if not kinds and "const" in schema:
            kinds = {kind_of(schema["const"])}
        found |= kinds
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            left.append(resolved(reference, root))
        for key in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(key)
            left += parts if isinstance(parts, list) else ()
    return found


def resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference within the schema names."""
    place: Any = root
    for step in reference.removeprefix("#/").split("/"):
        place = place.get(step) if isinstance(place, Mapping) else None
    return place


def kind_of(value: Any) -> str:
    """The type of JSON that a value is of."""
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def _kind_of_text(text: str) -> str | None:
    """The type of the JSON that a text is; None if it is none."""
    try:
        return kind_of(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
