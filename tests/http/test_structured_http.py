"""Structured outputs over HTTP: what is refused and how, what is accepted, and what it costs others.

The fake model knows no grammar, so what it answers is what the test put into the prompt; tests/cpu/test_structured.py
has a real one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from harness import Live
from pydantic import BaseModel
from test_bad_input import error_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TAG = "structured_outputs.structural_tag"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CHAIN = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(5000))
POWER = "((a{1000}){1000}){1000}"
DOUBLING = "start: T30\nT0: /a|b/\n" + "\n".join(f"T{i + 1}: T{i} T{i}" for i in range(30))


def json_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


def tags(**changes: Any) -> dict[str, Any]:
    fields = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
    return {"type": "structural_tag", **fields, **changes}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {}}, "response_format.type", ""),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"response_format": "json_object"}, "response_format", ""),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.json_schema", "text"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "strict": True}},
            "response_format.strict",
            "in json_schema",
        ),
        ({"response_format": {"type": "text", "triggers": ["<"]}}, "response_format.triggers", "text"),
        (json_schema(5), "response_format.json_schema.schema", "schema"),
        (json_schema("{"), "response_format.json_schema.schema", "not JSON"),
        (json_schema(False), "response_format.json_schema.schema", "an object, or true"),
        (json_schema({"type": "objekt"}), "response_format", "Invalid type: objekt at $.type"),
        (json_schema({"items": {"uniqueItems": True}}, strict=True), "response_format", "at $.items.uniqueItems"),
        (json_schema({"type": "string", "pattern": "("}), "response_format", "unclosed group"),
        (json_schema({"$ref": "http://x/y"}), "response_format", "http://x/y"),
        (json_schema({"$ref": "#"}), "response_format", "no text can match"),
        (json_schema({"enum": ["x" * 70_000]}), "response_format", "65536"),
        ({"response_format": tags(triggers=[])}, "response_format.triggers", "missing"),
        ({"response_format": tags(triggers=["<g"])}, "response_format.structures", "triggers"),
        ({"structured_outputs": {}}, "structured_outputs", "none"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex and choice"),
        ({"structured_outputs": {"regex": "a(b"}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs", "look-ahead"),
        ({"structured_outputs": {"regex": "<end>"}}, "structured_outputs", "special token"),
        ({"structured_outputs": {"grammar": DOUBLING}}, "structured_outputs", "too big"),
        ({"structured_outputs": {"regex": POWER}}, "structured_outputs", "make it smaller"),
        ({"structured_outputs": {"grammar": f"start: /{POWER}/"}}, "structured_outputs", "make it smaller"),
        (json_schema({"type": "string", "pattern": f"^{POWER}$"}), "response_format", "make it smaller"),
        ({"structured_outputs": {"regex": "a?" * 30_000}}, "structured_outputs", "make it smaller"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", ""),
        ({"structured_outputs": {"choice": ["a", "a"]}}, "structured_outputs.choice", "twice"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice", "empty"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice.0", ""),
        ({"structured_outputs": {"grammar": 'start: foo\nfoo "x"'}}, "structured_outputs", "2(5)"),
        ({"structured_outputs": {"grammar": "start: foo"}}, "structured_outputs", 'unknown name: "foo"'),
        ({"structured_outputs": {"grammar": "root ::= foo("}}, "structured_outputs", "line 1"),
        ({"structured_outputs": {"grammar": "root ::= " + "(" * 9999}}, "structured_outputs", "nested too deeply"),
        ({"structured_outputs": {"grammar": CHAIN}}, "structured_outputs", "unknown name"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs", "not JSON"),
        ({"structured_outputs": {"structural_tag": {"type": "text"}}}, "structured_outputs.structural_tag", "type"),
        ({"structured_outputs": {"regex": "a"}, **json_schema(SCHEMA)}, "structured_outputs", "only one"),
        ({"structured_outputs": {"structural_tag": tags(triggers=[])}}, TAG + ".triggers", "missing"),
        ({"structured_outputs": {"structural_tag": tags(triggers=["<g"])}}, TAG + ".structures", "triggers"),
        ({"guided_regex": "a(b"}, "guided_regex", "unclosed group"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex", "only one"),
        ({"guided_json": {"type": "objekt"}}, "guided_json", "Invalid type: objekt"),
        ({"guided_json": False}, "guided_json", "an object, or true"),
    ],
)
def test_what_cannot_be_is_a_400_that_says_where(
    http: httpx.Client, fields: dict[str, Any], param: str, words: str
) -> None:
    error = error_of(http.post(COMPLETIONS, json={"prompt": "x|", **fields}), 400)
    assert error["param"] == param, error
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}},
        json_schema(SCHEMA, strict=True, description="a thing"),
        json_schema(json.dumps(SCHEMA)),
        json_schema(True, strict=True),
        json_schema({"type": "array", "uniqueItems": True}),  # not strict: as far as it can be enforced
        {"response_format": tags()},
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"regex": r"^\d+/\d+$"}},
        {"structured_outputs": {"choice": ["a", 'b"\n\u2028', "", "ü"]}},
        {"structured_outputs": {"grammar": 'start: "a" %json {"type": "integer"}'}},
        {"structured_outputs": {"grammar": 'root ::= "a" [0-9]+'}},
        {"structured_outputs": {"structural_tag": json.dumps(tags())}},
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},  # what older clients of vLLM send
        {"guided_json": json.dumps(SCHEMA)},
        {"guided_regex": "a+", "response_format": {"type": "text"}},
        {"guided_choice": ["yes", "no"]},
        {"guided_grammar": 'root ::= "a"'},
        {"guided_grammar": 'root ::= "a"', "structured_outputs": {"grammar": 'root ::= "a"'}},  # as guidance does
    ],
)
def test_what_can_be_is_taken_as_it_is(http: httpx.Client, fields: dict[str, Any]) -> None:
    response = http.post(COMPLETIONS, json={"prompt": "x|", **fields})
    assert response.status_code == 200, response.text
    assert "x-quire-ignored-fields" not in response.headers


def test_nested_fields_that_nobody_knows_are_told(http: httpx.Client) -> None:
    fields = {"response_format": {"type": "json_object", "flavour": 1}}
    response = http.post(COMPLETIONS, json={"prompt": "x|", **fields})
    assert response.headers["x-quire-ignored-fields"] == "response_format.flavour"


def test_grammars_are_compiled_once_and_counted(serve: Callable[..., Live]) -> None:
    live = serve()
    with httpx.Client(base_url=live.url) as http:
        for regex, status in (("a+", 200), ("a+", 200), ("(", 400), ("(", 400)):
            body = {"prompt": "x|", "structured_outputs": {"regex": regex}}
            assert http.post(COMPLETIONS, json=body).status_code == status
        assert 'quire_grammar_compile_seconds_count{model_name="parrot"} 2.0' in http.get("/metrics").text


class Answer(BaseModel):
    a: int
    tags: list[str]


def test_the_sdk_parses_into_a_model(live: Live) -> None:
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none")
    said = '{"a": 1, "tags": ["x"]}'
    completion = client.chat.completions.parse(
        model="parrot", messages=[{"role": "user", "content": said}], response_format=Answer
    )
    assert completion.choices[0].message.parsed == Answer(a=1, tags=["x"])
