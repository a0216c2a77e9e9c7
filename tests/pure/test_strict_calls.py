"""Grammars of free text with calls in it: what they let through, the parser reads as valid calls; and closed schemas."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from engine.text.fields.structured import ResponseFormat
from engine.text.grammars.spec import close_schema
from engine.text.grammars.trial_process import to_guidance
from engine.text.tools.formats import TOOL_FORMATS
from engine.text.tools.tool_format import OfferedTool
from engine.text.types import CallArguments, CallBegin
from tests.pure.byte_vocabulary import ByteVocabulary

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOLS = [OfferedTool("weather", CITY, strict=True), OfferedTool("note", {})]
VALID = ['{"name": "weather", "arguments": {"city": "Rome"}}', '{"name":"note","arguments":{"x": [1, "}"]}}']
WRONG = [
    '{"name": "weather", "arguments": {"city": "Paris"}}',
    '{"name": "weather", "arguments": {"city": "Rome", "more": 1}}',
    '{"arguments": {"city": 1}, "name": "weather"}',
    '{"id": 1, "name": "weather", "parameters": {}}',
    '{"name": "weather"}',
    '{"name": "nobody", "arguments": {}}',
]
MARKS = {
    "hermes": ("<tool_call>\n", "\n</tool_call>", "\n"),
    "llama3_json": ("", "", "; "),
    "mistral": ("[TOOL_CALLS] ", "", ""),
    "json": ("<|tool_call|>", "<|/tool_call|>", ""),
}
VOCABULARY = ByteVocabulary({})
TOKENIZER = LLTokenizer(TokenizerWrapper(VOCABULARY), eos_token=[VOCABULARY.eos_token_id])
FIRSTS = {
    (name, parallel): LLMatcher(TOKENIZER, TOOL_FORMATS[name].grammar(TOOLS, {}, parallel=parallel), log_level=0)
    for name in MARKS
    for parallel in (False, True)
}


def lets(tool_format: str, text: str, *, parallel: bool = True) -> bool:
    """Whether the whole text may be an answer."""
    matcher = FIRSTS[tool_format, parallel].deep_copy()
    assert not matcher.is_error(), matcher.get_error()
    ids = VOCABULARY(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def calls_of(tool_format: str, text: str) -> list[tuple[str, str]]:
    parser = TOOL_FORMATS[tool_format].parser({tool.name: {} for tool in TOOLS})
    calls: list[tuple[str, str]] = []
    for piece in parser.push(text) + parser.finish():
        if isinstance(piece, CallBegin):
            calls.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return calls


@pytest.mark.parametrize("tool_format", MARKS)
def test_text_is_free_and_valid_calls_may_be_made(tool_format: str) -> None:
    opening, closing, between = MARKS[tool_format]
    one, two = (f"{opening}{call}{closing}" for call in VALID)
    for text in (
        "",
        "Let me see: 2 {3}",
        f"{one}{between}{two}",
        f"{opening}[{', '.join(VALID)}]{closing}",
        '{"a": 1}',
    ):
        assert lets(tool_format, text), text
    if opening:
        assert lets(tool_format, f"Well.\n{one} and {two}\nDone.")
    assert not lets(tool_format, f"{opening}[{', '.join(VALID)}]{closing}", parallel=False)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("tool_format", MARKS)
def test_no_call_of_a_strict_tool_is_wrong(tool_format: str, wrong: str) -> None:
    opening, closing, between = MARKS[tool_format]
    is_text = TOOL_FORMATS[tool_format].only_known and "nobody" in wrong and not opening
    for text in (f"{opening}{wrong}{closing}", f"{opening}{VALID[1]}{closing}{between}{opening}{wrong}{closing}"):
        assert lets(tool_format, text) == (is_text and text == wrong)


def test_a_name_may_stand_before_arguments_where_the_dialect_has_it() -> None:
    assert lets("mistral", 'Well [TOOL_CALLS]weather{"city": "Rome"}[TOOL_CALLS]note[ARGS]{"x": 1}')
    assert lets("mistral", '[TOOL_CALLS]weather[CALL_ID]abcdef123[ARGS]{"city": "Rome"}')
    assert not lets("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}')


def test_a_mark_may_be_a_token() -> None:
    vocabulary = ByteVocabulary({"<|python_tag|>": 7, "<other>": 8})
    tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=[vocabulary.eos_token_id])
    grammar = TOOL_FORMATS["llama3_json"].grammar(TOOLS, {"<|python_tag|>": 7}, parallel=True)
    for call, is_fine in ((VALID[0], True), (WRONG[0], False)):
        ids = [*vocabulary(b"see "), 7, *vocabulary(call.encode())]
        assert (LLMatcher(tokenizer, grammar, log_level=0).try_consume_tokens(ids) == len(ids)) is is_fine


PIECES = st.sampled_from(
    [
        *VALID,
        *WRONG,
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        "[",
        "]",
        ", ",
        ";",
        "\n",
        "hm ",
        "{",
    ]
)


@settings(max_examples=300)
@given(tool_format=st.sampled_from(sorted(MARKS)), pieces=st.lists(PIECES, max_size=6))
def test_whatever_is_let_through_is_read_as_valid_calls(tool_format: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    if not lets(tool_format, text):
        return
    for name, arguments in calls_of(tool_format, text):
        assert isinstance(json.loads(arguments), dict)
        if name == "weather":
            jsonschema.validate(json.loads(arguments), CITY | {"additionalProperties": False})


OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = {**OBJECT, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (OBJECT, CLOSED),
        ({"type": "array", "items": OBJECT}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [OBJECT, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$ref": "#/$defs/x", "$defs": {"x": OBJECT}}, {"$ref": "#/$defs/x", "$defs": {"x": CLOSED}}),
        ({"properties": {"properties": OBJECT}}, {"properties": {"properties": CLOSED}, "additionalProperties": False}),
        ({"enum": [OBJECT]}, {"enum": [OBJECT]}),  # a value, no schema
        ({**OBJECT, "additionalProperties": True}, {**OBJECT, "additionalProperties": True}),
        ({**OBJECT, "additionalProperties": OBJECT}, {**OBJECT, "additionalProperties": CLOSED}),
        ({**OBJECT, "anyOf": [OBJECT]}, {**OBJECT, "anyOf": [OBJECT]}),
        ({"allOf": [OBJECT, {"$ref": "#/x"}], "x": OBJECT}, {"allOf": [OBJECT, {"$ref": "#/x"}], "x": OBJECT}),
        ({"type": "object"}, {"type": "object"}),
        (True, True),
    ],
)
def test_strict_closes_objects_that_name_their_properties(schema: Any, closed: Any) -> None:
    before = json.dumps(schema)
    assert close_schema(schema) == closed
    assert json.dumps(schema) == before


def test_a_schema_too_deep_to_be_looked_through_is_left_to_the_compiler() -> None:
    deep: Any = OBJECT
    for _ in range(5000):
        deep = {"items": deep}
    assert close_schema(deep) is deep


def test_response_formats_are_closed_where_they_are_strict_and_bounded_in_space() -> None:
    for strict, expected in ((True, CLOSED), (False, OBJECT)):
        asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": OBJECT, "strict": strict}}
        spec = ResponseFormat.model_validate(asked).spec()
        assert spec is not None
        assert json.loads(spec.text) == expected
        assert (spec.is_lenient, spec.whitespace) == (not strict, r"[\x20\x09\x0A\x0D]{0,40}")
    tags = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": OBJECT, "end": "</f>"}],
        "triggers": ["<f"],
    }
    spec = ResponseFormat.model_validate(tags).spec()
    assert spec is not None
    matcher = LLMatcher(TOKENIZER, to_guidance(spec._asdict() | {"kind": spec.kind.value, "marks": ()}), log_level=0)
    for space, is_fine in ((40, True), (41, False)):
        ids = VOCABULARY(f'so <f>{{{" " * space}"a": 1}}</f>'.encode())
        assert (matcher.deep_copy().try_consume_tokens(ids) == len(ids)) is is_fine
