"""The pages of endpoints and of request fields, from the OpenAPI document.

No-ops, hints and refused fields come from the classes of bodies, which declare them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from engine.text.fields.body import RequestBody
from server.openai.translated import PASSED_ON, TranslatedBody
from server.operations.unserved import UNSERVED
from tests.reference.tables import MADE, cell, table

_API_HEAD = f"""# API

{MADE}

Every path also works with a slash at its end. `GET /openapi.json` is the same as a document for programs. Bodies are JSON,
except the upload of a file. Errors have [one shape](errors.md) on every path.
"""
_FIELDS_HEAD = f"""# Fields of requests

{MADE}

The tables list the fields that are *honoured*. The other fields stand below each table:

- a field *without effect* asks for something that cannot change the answer;
- a *hint* is dropped where it cannot be followed;
- a *refused* field gets a 400 that names it, because without it the answer would be silently wrong. A value that asks for what happens anyway
  is accepted.

null means absent. The header `x-quire-ignored-fields` names what was dropped, and a metric counts it: hints, unknown fields (of items and parts, too), honoured fields
that the served model cannot follow (`reasoning_effort` and `thinking` of a model that does not reason, `priority` under another policy),
and tools of a type that a provider would run (`tools.web_search`) beside tools of the client. `--strict-fields` refuses all of these.
"""
_SCHEMAS = "#/components/schemas/"
_METHODS = ("get", "post", "delete")

_ANSWERS_HEAD = f"""# Fields of answers

{MADE}

Fields that are null are left out, except where OpenAI sends them. A stream of chat or completions has chunks of the same object, with
`delta` instead of `message`; a stream of responses or messages has the events of those APIs.
"""

Schema = Mapping[str, Any]


def _operations(document: Schema) -> list[tuple[str, Schema]]:
    return [
        (f"{method.upper()} {path}", methods[method])
        for path, methods in document["paths"].items()
        for method in sorted(methods, key=_METHODS.index)
    ]


def endpoints_page(document: Schema) -> str:
    """Return the page of endpoints."""
    rows = []
    for endpoint, operation in _operations(document):
        name, answer = _body_name(operation), _answer_name(operation)
        text = operation.get("description", operation.get("summary", ""))
        links = (_link(name, "fields.md") if name else "", _link(answer, "answers.md") if answer else "")
        rows.append((f"`{endpoint}`", cell(text), *links))
    others = [(f"`{path}`", cell(message)) for path, message in UNSERVED.items()]
    lines = [_API_HEAD, *table(("endpoint", "does", "body", "answer"), rows), "## Routes of other servers\n"]
    lines.append("These, and all paths below them, answer a 404 with the alternative.\n")
    return "\n".join([*lines, *table(("path", "answer"), others)])


class FieldsPage:
    """A page of fields: those of the endpoints' bodies or answers, then those of the objects in them."""

    def __init__(self, document: Schema, *, of_answers: bool = False) -> None:
        self._document = document
        self._of_answers = of_answers
        self._schemas = document["components"]["schemas"]
        self._classes = {body.__name__: body for body in _subclasses(RequestBody)}
        self._sections: dict[str, None] = {}  # schemas with a section, in order

    def render(self) -> str:
        """Return the page."""
        parts = [_ANSWERS_HEAD, "## Answers\n"] if self._of_answers else [_FIELDS_HEAD, "## Bodies\n"]
        name_of = _answer_name if self._of_answers else _body_name
        bodies: dict[str, list[str]] = {}
        for endpoint, operation in _operations(self._document):
            if name := name_of(operation):
                bodies.setdefault(name, []).append(endpoint)
        self._sections.update(dict.fromkeys(bodies))
        parts += [part for name, endpoints in bodies.items() for part in self._section(name, endpoints)]
        parts.append("## Objects in them\n")
        done = len(bodies)
        while done < len(self._sections):  # a section may name further objects
            parts += self._section(list(self._sections)[done], [])
            done += 1
        return "\n".join(parts)

    def _section(self, name: str, endpoints: list[str]) -> Iterator[str]:
        """Yield the section of a body or an object."""
        schema = self._schemas[name]
        yield f"### {name}\n"
        if endpoints:
            yield ", ".join(f"`{endpoint}`" for endpoint in endpoints) + "\n"
        rows = []
        required = schema.get("required", ())
        for field, own in schema.get("properties", {}).items():
            absent = "required" if field in required else _default(own)
            rows.append((f"`{field}`", cell(own.get("description", "")), cell(self._kind(own)), cell(absent)))
        if rows and self._of_answers:
            yield from table(("field", "meaning", "type"), (row[:3] for row in rows))
        elif rows:
            yield from table(("field", "meaning", "takes", "if absent"), rows)
        body = self._classes.get(name)
        if body is not None:
            yield from _others(body)

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
        kinds = schema.get("type", "anything")
        kind = " or ".join(kinds) if isinstance(kinds, list) else str(kinds)
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


def _answer_name(operation: Schema) -> str:
    content = operation.get("responses", {}).get("200", {}).get("content", {})
    reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
    return str(reference).removeprefix(_SCHEMAS)


def _others(body: type[RequestBody]) -> Iterator[str]:
    """Yield the fields that are known without being declared, a list of each kind."""
    if issubclass(body, TranslatedBody):
        yield f"**As in [ChatBody](#chatbody):** {_names(PASSED_ON - body.UNSUPPORTED.keys())}\n"
    for kind, names in (("Without effect", body.NO_OPS), ("Hints", body.HINTS.keys())):
        if left := names - body.model_fields.keys():
            yield f"**{kind}:** {_names(left)}\n"
    if refused := sorted(body.UNSUPPORTED.keys() - body.model_fields.keys()):
        yield f"**Refused:** {', '.join(_refused(body, field) for field in refused)}\n"


def _refused(body: type[RequestBody], field: str) -> str:
    neutral, instead = body.UNSUPPORTED[field]
    values = " or ".join(dict.fromkeys(f"`{json.dumps(value)}`" for value in neutral))
    notes = "; ".join(note for note in (values and f"except {values}", instead) if note)
    return f"`{field}`" + (f" ({notes})" if notes else "")


def _names(fields: Any) -> str:
    return ", ".join(f"`{field}`" for field in sorted(fields))


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


def _link(name: str, page: str = "") -> str:
    return f"[{name}]({page}#{name.lower()})"
