"""Writes docs/reference.md: every endpoint, every field, every setting.

    python -m server.operations.reference > docs/reference.md

tests/http/test_reference.py compares. Made from the OpenAPI document and from the no-ops, hints and refused fields that
the classes of bodies declare.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from engine.text.fields.base import RequestBody
from server.app import routers
from server.http.openapi import describe
from server.openai.translated import PASSED_ON, TranslatedBody
from server.settings.reference import settings_section

HEAD = """# Reference

Made from the code by `python -m server.operations.reference`; a test compares them, so this page describes this version.

A field is *honoured*, a *no-op* that by its meaning cannot change the answer, a *hint* that is dropped, or *refused* with a
400 that names it because the answer would be silently wrong without it, unless its value asks for what is done anyway. null
means absent. Hints and unknown fields are named in the header `x-quire-ignored-fields` and counted, or refused with
`--strict-fields`. So are honoured fields that the served model cannot follow (`reasoning_effort` and `thinking` of a model
that does not reason, `priority` under another policy), and tools of types that a provider would run (`tools.web_search`)
beside tools that the client runs.
"""
_SCHEMAS = "#/components/schemas/"
_METHODS = ("get", "post", "delete")

Schema = Mapping[str, Any]


class Reference:
    """Renders an OpenAPI document as Markdown."""

    def __init__(self, document: Schema) -> None:
        self._operations: list[tuple[str, Schema]] = [
            (f"{method.upper()} {path}", methods[method])
            for path, methods in document["paths"].items()
            for method in sorted(methods, key=_METHODS.index)
        ]
        self._schemas = document["components"]["schemas"]
        self._classes = {body.__name__: body for body in _subclasses(RequestBody)}
        self._sections: dict[str, None] = {}  # schemas with a section, in order

    def render(self) -> str:
        """Return the page."""
        parts = [HEAD, *settings_section(), "## Endpoints\n", *self._endpoints(), "\n## Bodies\n"]
        bodies: dict[str, list[str]] = {}
        for endpoint, operation in self._operations:
            if name := _body_name(operation):
                bodies.setdefault(name, []).append(endpoint)
        self._sections.update(dict.fromkeys(bodies))
        parts += [part for name, endpoints in bodies.items() for part in self._section(name, endpoints)]
        parts.append("## Objects in them\n")
        done = len(bodies)
        while done < len(self._sections):  # a section may name further objects
            parts += self._section(list(self._sections)[done], [])
            done += 1
        return "\n".join(parts).rstrip() + "\n"

    def _endpoints(self) -> Iterator[str]:
        yield "| endpoint | | body |\n|---|---|---|"
        for endpoint, operation in self._operations:
            name = _body_name(operation)
            text = " ".join(operation.get("description", operation.get("summary", "")).split())
            yield f"| `{endpoint}` | {_cell(text)} | {_link(name) if name else ''} |"

    def _section(self, name: str, endpoints: list[str]) -> Iterator[str]:
        """Yield the section of a body or an object."""
        schema = self._schemas[name]
        yield f"### {name}\n"
        if endpoints:
            yield ", ".join(f"`{endpoint}`" for endpoint in endpoints) + "\n"
        yield "| field | takes | if absent | |\n|---|---|---|---|"
        required = schema.get("required", ())
        for field, own in schema.get("properties", {}).items():
            absent = "required" if field in required else _default(own)
            yield f"| `{field}` | {_cell(self._kind(own))} | {_cell(absent)} | honoured |"
        body = self._classes.get(name)
        if body is not None:
            yield from _others(body)
        yield ""

    def _kind(self, schema: Schema) -> str:
        """Return the values that a schema takes, in words."""
        if "$ref" in schema:
            name = schema["$ref"].removeprefix(_SCHEMAS)
            if not self._schemas[name].get("properties"):
                return self._kind(self._schemas[name])
            self._sections[name] = None
            return _link(name)
        for union in ("anyOf", "oneOf"):
            if union in schema:
                return " or ".join(
                    dict.fromkeys(self._kind(each) for each in schema[union] if each != {"type": "null"})
                )
        if "enum" in schema or "const" in schema:
            return ", ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
        kind = str(schema.get("type", "anything"))
        if kind == "array":
            items = self._kind(schema.get("items", {}))
            return f"list of {items}" + _range(schema, "minItems", "maxItems", " of them")
        if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
            return f"object of {self._kind(schema['additionalProperties'])}"
        if kind == "string":
            return kind + _range(schema, "minLength", "maxLength", " characters")
        return kind + _range(schema, "minimum", "maximum", "")


def _subclasses(cls: type[RequestBody]) -> Iterator[type[RequestBody]]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


def _body_name(operation: Schema) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
    return str(reference).removeprefix(_SCHEMAS)


def _others(body: type[RequestBody]) -> Iterator[str]:
    """Yield the rows of fields that are known without being declared."""
    for field in sorted(PASSED_ON) if issubclass(body, TranslatedBody) else ():
        yield f"| `{field}` | as in [ChatBody](#chatbody) | | honoured |"
    for kind, names in (("no-op", body.NO_OPS), ("hint", body.HINTS.keys())):
        for field in sorted(names - body.model_fields.keys()):
            yield f"| `{field}` | anything | | {kind} |"
    for field in sorted(body.UNSUPPORTED.keys() - body.model_fields.keys()):
        neutral, instead = body.UNSUPPORTED[field]
        values = ", ".join(dict.fromkeys(f"`{json.dumps(value)}`" for value in neutral))
        takes = f"only {values}" if neutral else "nothing"
        yield f"| `{field}` | {takes} | | refused{_cell(f': {instead}') if instead else ''} |"


def _default(schema: Schema) -> str:
    """Return the default of a field, or ""."""
    values = [each["default"] for each in (schema, *schema.get("anyOf", ())) if "default" in each]
    return f"`{json.dumps(values[0])}`" if values and values[0] not in (None, [], {}, "") else ""


def _range(schema: Schema, low: str, high: str, unit: str) -> str:
    """Return the bounds of a schema, without those that only keep arithmetic sane."""
    bounds = (
        ("at least", low),
        ("more than", "exclusiveMinimum"),
        ("at most", high),
        ("less than", "exclusiveMaximum"),
    )
    parts = [f"{word} {schema[name]}" for word, name in bounds if name in schema and abs(schema[name]) < 2**31]
    return f", {' and '.join(parts)}{unit}" if parts else ""


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def reference() -> str:
    """Return the page."""
    return Reference(describe(routers())).render()


if __name__ == "__main__":
    sys.stdout.write(reference())
