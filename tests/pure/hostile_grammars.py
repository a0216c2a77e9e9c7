"""Grammars that take long, explode or crash the library, one of each kind; most of them are short."""

from __future__ import annotations

import json
import string
from itertools import product
from typing import Any

from engine.text.grammars.spec import GrammarKind, GrammarSpec

POWER = "((a{1000}){1000}){1000}"
WORDS = ["".join(letters) for letters in product(string.ascii_lowercase, repeat=3)]


def schema(**fields: Any) -> GrammarSpec:
    return GrammarSpec.of_json_schema(fields)


def objects(num_properties: int) -> dict[str, Any]:
    return {"type": "object", "properties": {word: {} for word in WORDS[:num_properties]}}


HOSTILE = {
    "nested counts": GrammarSpec(GrammarKind.REGEX, POWER),
    "long optional": GrammarSpec(GrammarKind.REGEX, "a?" * 30_000),
    "nested unicode": GrammarSpec(GrammarKind.REGEX, r"(\p{L}{1,200}\p{N}?){1,200}"),
    "pattern": schema(type="string", pattern=f"^{POWER}$"),
    "pattern of a property": schema(
        type="object", properties={"a": {"pattern": POWER, "type": "string"}}, required=["a"]
    ),
    "many optional properties": schema(**objects(3000)),
    "product of choices": schema(allOf=[{"anyOf": [{"minimum": i}, {"maxLength": i + 1}]} for i in range(24)]),
    "product of objects": schema(
        allOf=[{"oneOf": [objects(4 * i + 4) for i in range(4)]} for _ in range(10)],
    ),
    "deep schema": GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type":"array","items":' * 800 + "{}" + "}" * 800),
    "lark pattern": GrammarSpec.of_lark(f"start: /{POWER}/"),
    "lark counts": GrammarSpec.of_lark('start: (("a" "b"){1000}){1000}'),
    "lark doubling rules": GrammarSpec.of_lark(
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)) + '\nr60: "a"'
    ),
    "lark doubling terminals": GrammarSpec.of_lark(
        "start: T30\nT0: /a|b/\n" + "\n".join(f"T{i + 1}: T{i} T{i}" for i in range(30))
    ),
    "lark deep rules": GrammarSpec.of_lark(
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(3500)) + '\nr3500: "a"'
    ),
    "lark many terminals": GrammarSpec.of_lark(
        "start: "
        + " | ".join(f"T{i}" for i in range(1500))
        + "\n"
        + "\n".join(f"T{i}: /[a-z ]*{word}[a-z ]*/" for i, word in enumerate(WORDS[:1500]))
    ),
    "lark intersection": GrammarSpec.of_lark(
        "start: X\nX: /[a-z ]*e[a-z ]{12}/ & /[a-z ]*t[a-z ]{13}/ & ~/[a-z ]*z[a-z]{9}/"
    ),
    "lark json": GrammarSpec.of_lark("start: %json " + json.dumps({"type": "string", "pattern": f"^{POWER}$"})),
    "gbnf depth": GrammarSpec.of_lark("root ::= " + "(" * 9999),
    "tag": GrammarSpec(
        GrammarKind.STRUCTURAL_TAG,
        json.dumps(
            [{"begin": "<f>", "grammar": {"type": "string", "pattern": POWER}, "end": "</f>", "trigger": "<f>"}]
        ),
    ),
}
SLOW = [
    GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"type": "integer", "multipleOf": 50_021 + i})) for i in range(6)
]
