"""What an answer is to be constrained to, as text: the key under which a compiled grammar is kept. Pure data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple


class Kind(str, Enum):
    """In which language a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"  # a JSON list of strings
    GRAMMAR = "grammar"  # Lark as llguidance has it, or GBNF, told apart by its text
    STRUCTURAL_TAG = "structural_tag"  # free text in which certain tags begin a constrained part


class GrammarSpec(NamedTuple):
    """One grammar, not yet compiled. `options` are for JSON: see `of_json_schema`."""

    kind: Kind
    text: str
    whitespace: str | None = None
    is_lenient: bool = False

    @classmethod
    def of_json_schema(
        cls, schema: Mapping[str, Any] | bool, *, whitespace: str | None = None, is_lenient: bool = False
    ) -> GrammarSpec:
        """A JSON text that is valid against a schema; whoever constrains a tool's call starts here.

        A call of one of several tools is `{"anyOf": [{"type": "object", "properties": {"name": {"const": ...},
        "arguments": <its schema>}, "required": [...], "additionalProperties": False}, ...]}`. `whitespace` is the regex
        of what may stand between JSON's tokens, "" for nothing. `is_lenient` leaves out keywords that cannot be
        enforced; else they are refused.
        """
        # Not sorted: the order of properties is the order in which they are written.
        return cls(Kind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False), whitespace, is_lenient)

    @classmethod
    def of_choice(cls, choices: Sequence[str]) -> GrammarSpec:
        """One of some texts."""
        return cls(Kind.CHOICE, json.dumps(choices))

    @classmethod
    def of_lark(cls, text: str) -> GrammarSpec:
        """A grammar in llguidance's Lark, which can embed JSON schemas (`%json {...}`) and special tokens (`<|name|>`)."""
        return cls(Kind.GRAMMAR, text)


ANY_OBJECT = GrammarSpec.of_json_schema({"type": "object"})
