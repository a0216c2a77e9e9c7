"""The source of a grammar, by whose digest requests name it, and of the vocabulary. Pure data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from hashlib import blake2b
from typing import Any, NamedTuple


class GrammarKind(str, Enum):
    """The language in which a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"  # a JSON list of strings
    LARK = "grammar"  # in llguidance's tool_format, or GBNF; the text shows which
    STRUCTURAL_TAG = "structural_tag"  # free text in which certain tags begin a constrained part


class GrammarSpec(NamedTuple):
    """A grammar before it is compiled; see `of_json_schema` for the last two."""

    kind: GrammarKind
    text: str
    whitespace: str | None = None
    is_lenient: bool = False

    @property
    def digest(self) -> bytes:
        """Return what requests name it by."""
        text = "\0".join((self.kind.value, self.whitespace or "", str(self.whitespace is None), str(self.is_lenient)))
        return blake2b(f"{text}\0{self.text}".encode("utf-8", "surrogatepass"), digest_size=16).digest()

    @classmethod
    def of_json_schema(
        cls, schema: Mapping[str, Any] | bool, *, whitespace: str | None = None, is_lenient: bool = False
    ) -> GrammarSpec:
        """Return the grammar of JSON texts that are valid against a schema.

        `whitespace` is a regex of the text between JSON's tokens, "" for none. `is_lenient` leaves out keywords that
        cannot be enforced; otherwise they are refused.
        """
        # Not sorted: the order of properties is the order in which they are written.
        return cls(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False), whitespace, is_lenient)

    @classmethod
    def of_lark(cls, text: str) -> GrammarSpec:
        """Return a grammar in Lark, with `%json {...}` for schemas and `<|name|>`."""
        return cls(GrammarKind.LARK, text)


class VocabularySource(NamedTuple):
    """What grammars need to know of the tokens."""

    tokenizer_json: str
    vocab_size: int
    end_ids: frozenset[int]
    special_tokens: tuple[str, ...]  # their names
    marks: tuple[str, ...] = ()  # of others that no text of a grammar spells, such as <tool_call>


MAX_TEXT = 64 << 10  # characters of a grammar; masks of a constant this long still take 20 ms
ANY_OBJECT = GrammarSpec.of_json_schema({"type": "object"})

# Keywords that say whether an object may have further properties.
_FURTHER = ("additionalProperties", "patternProperties", "unevaluatedProperties")
# Keywords that describe the same object elsewhere, so `properties` does not name all of it.
_ELSEWHERE = ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE = ("items", "additionalProperties", "additionalItems", "contains")
_LISTED = ("anyOf", "oneOf", "prefixItems", "items")


def close_schema(schema: Any) -> Any:
    """Return a strict schema with its objects closed to further properties.

    OpenAI asks that every object of a strict schema says so itself. An object that does not is taken to mean it, because
    a small model would add properties until its tokens end. A schema that joins incomplete parts with `allOf` stays
    unchanged.
    """
    try:
        return schema if _joins(schema) else _close(schema)
    except RecursionError:  # it is refused when it is compiled
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
    if isinstance(schema.get("properties"), dict) and not any(key in schema for key in (*_FURTHER, *_ELSEWHERE)):
        closed["additionalProperties"] = False
    return closed


_ANNOTATIONS = ("description", "title", "examples", "$comment")
_INNER = (*_SINGLE, *_LISTED, "allOf", "not", "if", "then", "else", "unevaluatedProperties")


def drop_annotations(schema: Any) -> Any:
    """Return a schema without texts that no grammar depends on, which are most of many schemas."""
    try:
        return _drop_annotations(schema)
    except RecursionError:  # it is refused when it is compiled
        return schema


def _drop_annotations(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_drop_annotations(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            kept[key] = {name: _drop_annotations(inner) for name, inner in value.items()}
        elif key not in _ANNOTATIONS:
            kept[key] = _drop_annotations(value) if key in _INNER else value
    return kept
