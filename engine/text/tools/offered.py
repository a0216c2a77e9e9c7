"""A tool as the grammars of calls need it: its name, and Lark for its arguments. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from engine.text.grammars.spec import close_schema

MAX_CALLS = 16  # of one answer that a grammar makes
_OPEN_ENDED = ("additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf")


class OfferedTool(NamedTuple):
    """One of a request's tools."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False

    def arguments(self, options: Mapping[str, Any]) -> str:
        """Arguments that are valid against the schema. What of it cannot be enforced is refused if it is strict, else left out.

        Where it says nothing of further properties there are none, since a small model would write them for ever; no
        schema at all means that there are no arguments.
        """
        schema: dict[str, Any] = {"type": "object", **self.parameters}
        if not any(key in schema for key in _OPEN_ENDED):
            schema["additionalProperties"] = False
        return embedded(close_schema(schema) if self.strict else schema, {**options, "lenient": not self.strict})


def embedded(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Lark's way to embed a schema. What looks like a rule of GBNF is spelled so that it does not."""
    return "%json " + json.dumps({**schema, "x-guidance": options}).replace("::=", ":\\u003a=")
