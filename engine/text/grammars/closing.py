"""What `strict` adds to a schema: an object has the properties that are named, and no others.

OpenAI asks of strict schemas that every object says `additionalProperties: false`. One that says nothing is taken to mean
it, since a small model would go on adding properties until its tokens end. Without `strict` JSON Schema's own meaning
holds. Pure.
"""

from __future__ import annotations

from typing import Any

_TELLING = ("additionalProperties", "patternProperties", "unevaluatedProperties")
# Describe the same object from elsewhere, so that what is named here is not all of it.
_BESIDES = ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE = ("items", "additionalProperties", "additionalItems", "contains")
_LISTED = ("anyOf", "oneOf", "prefixItems", "items")


def close(schema: Any) -> Any:
    """The schema with `additionalProperties: false` wherever an object names properties and leaves open whether others may be.

    One that puts objects together with `allOf`, from parts that are each incomplete, stays as it is.
    """
    try:
        return schema if _joins(schema) else _close(schema)
    except RecursionError:  # it is refused where it is compiled
        return schema


def _joins(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_joins, schema))
    if not isinstance(schema, dict):
        return False
    parts = schema.get("allOf")
    return (isinstance(parts, list) and len(parts) > 1) or any(map(_joins, schema.values()))


def _close(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for key, value in schema.items():
        if isinstance(value, dict):
            if key in _NAMED:
                closed[key] = {name: _close(inner) for name, inner in value.items()}
            elif key in _SINGLE:
                closed[key] = _close(value)
        elif isinstance(value, list) and key in _LISTED and "properties" not in schema:
            closed[key] = [_close(inner) for inner in value]
    if isinstance(schema.get("properties"), dict) and not any(key in schema for key in (*_TELLING, *_BESIDES)):
        closed["additionalProperties"] = False
    return closed
