"""Calls in XML: found in any pieces, their parameters become JSON of the types that the schema names."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from engine.core.errors import InvalidRequestError
from engine.text.tools.formats import TOOL_FORMATS, detect_tool_format
from engine.text.tools.text_values import json_of, types_of
from engine.text.tools.tool_format import OfferedTool
from engine.text.types import CallArguments, CallBegin, Content
from tests.pure.byte_vocabulary import ByteVocabulary
from tests.pure.calls import check_in_pieces, parsed

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "unit": {"$ref": "#/$defs/unit"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "level": {"type": "number"},
    },
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
TOOLS: dict[str, dict[str, Any]] = {"weather": WEATHER, "stop": {}}


def parse(*texts: str) -> list[Any]:
    """Content as strings, calls as [name, arguments]."""
    return parsed(TOOL_FORMATS["qwen3_xml"].parser(TOOLS), *texts)


def call(name: str = "weather", **parameters: str) -> str:
    """As the template of Qwen3-Coder writes one."""
    members = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{members}</function>\n</tool_call>"


ROME = call(city="Rome")
TOLD = ["weather", '{"city": "Rome"}']
GOOD = [
    (ROME, [TOLD]),
    (f"Let me look.\n{ROME}\n{ROME}", ["Let me look.", TOLD, TOLD]),
    (f"{ROME} Done.", [TOLD, " Done."]),
    (call(city='say "hi"\n\n  <b> & \\ é', days="3"), [["weather", '{"city": "say \\"hi\\"\\n\\n  <b> & \\\\ é", "days": 3}']]),
    (call(days="7", exact="True", tags='["a", "</b>"]', unit="C", note="null", level="2"),
     [["weather", '{"days": 7, "exact": true, "tags": ["a", "</b>"], "unit": "C", "note": null, "level": 2}']]),
    (call(city="7", note="7", unit="7", days="soon"), [["weather", '{"city": "7", "note": "7", "unit": "7", "days": "soon"}']]),
    (call(city="", note=""), [["weather", '{"city": "", "note": ""}']]),
    (call("stop"), [["stop", "{}"]]),
    (call("stop", x="1", y="word"), [["stop", '{"x": 1, "y": "word"}']]),
    (call("unheard_of", x="1"), [["unheard_of", '{"x": 1}']]),
    ("<function=stop></function>", [["stop", "{}"]]),  # the tags forgotten
    ("<function=weather>\n<parameter=city>Rome</parameter>\n</function>\n</tool_call>", [TOLD]),
    ("<tool_call><function=weather><parameter=city>\nRome\n</function></tool_call>", [TOLD]),  # the parameter's end forgotten
    ("<tool_call><function=weather>\n<parameter=city>\nRome\n<parameter=days>\n1\n</parameter></function></tool_call>",
     [["weather", '{"city": "Rome", "days": 1}']]),
    ("<tool_call><function=weather><parameter=city>Rome</parameter></tool_call>", [TOLD]),
    ("<tool_call><function=weather><parameter=city>Rome</parameter>", [TOLD]),
    ("<tool_call><function=stop>", [["stop", "{}"]]),
    ("<tool_call><function=weather><parameter=city>Ro", [["weather", '{"city": "Ro']]),  # cut short
    ("<tool_call><function=weather><parameter=tags>[1, ", [["weather", '{"tags": [1, ']]),
    ("<tool_call><function=stop>oops</function></tool_call>", [["stop", "{}"], "oops</function></tool_call>"]),
    (f"<function=stop></function>{ROME}", [["stop", "{}"], TOLD]),
    (ROME.replace("</function>", "<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n1\n</parameter>\n</function>"),
     [["weather", '{"city": "Rome", "days": 1}']]),  # the first counts
    (f"<function=stop>{'<parameter=x>1</parameter>' * 3}</function>{ROME}", [["stop", '{"x": 1}'], TOLD]),
    ("<tool_call><function=weather><parameter=city>Rome</parameter><parameter=city>Os", [TOLD]),
    ("<tool_call><function=weather><parameter=city>Rome</parameter>\n<parameter=lon", [TOLD]),
]  # fmt: skip

CONTENT = [
    "just words, a < b, <tool_",
    " spaces \n around \n",
    "<tool_call>get the weather</tool_call>",
    '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>',
    "the tag <function=unheard_of></function> in a text",
    "<tool_call><function=a b>",
    "<tool_call>\n<function=" + "x" * 129,
    "<tool_call>\n<func",
]


@pytest.mark.parametrize(("text", "expected"), GOOD)
def test_calls_in_any_two_pieces_and_letter_by_letter(text: str, expected: list[Any]) -> None:
    check_in_pieces(parse, text, expected)


@pytest.mark.parametrize("text", CONTENT)
def test_what_is_no_call_is_content_exactly(text: str) -> None:
    assert parse(text) == [text]
    assert parse(*text) == [text]


def test_strings_come_as_they_are_written() -> None:
    parser = TOOL_FORMATS["qwen3_xml"].parser(TOOLS)
    assert parser.push("Well <tool_call>\n<function=weather>\n<par") == [Content("Well"), CallBegin("weather")]
    assert parser.push("ameter=city>\nRo") == [CallArguments('{"city": "Ro')]
    assert parser.push("me\n</param") == [CallArguments("me")]
    assert parser.push("eter>\n") == [CallArguments('"')]
    assert parser.push("</function>") == [CallArguments("}")]
    assert parser.push("\n</tool_call>") == parser.finish() == []


WORDS = [
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "</function>",
    "<parameter=",
    "</parameter>",
    "weather",
    "city",
    "days",
]
WORDS += [">", "\n", " ", "é", "\ud800", "\x00", '"', "\\", "<", "1", "[", "true"]
texts = st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=24).map("".join)


@given(texts, st.data())
def test_any_pieces_give_the_same_and_what_has_no_call_is_content(text: str, data: Any) -> None:
    whole = parse(text)
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8))), len(text)]
    assert parse(*(text[i:j] for i, j in itertools.pairwise(edges))) == whole
    if not any(isinstance(part, list) for part in whole):
        assert "".join(whole) == text


values = st.fixed_dictionaries(
    {},
    optional={
        "city": st.text(st.characters(exclude_categories=["Cs"])).filter(
            lambda text: "\n<" not in text and "</" not in text
        ),
        "days": st.integers(),
        "exact": st.booleans(),
        "tags": st.lists(st.text(max_size=4), max_size=3),
        "unit": st.sampled_from(["C", "F"]),
        "note": st.none() | st.sampled_from(["", "x y", "12"]),
        "level": st.floats(allow_nan=False, allow_infinity=False),
    },
)


@given(values)
def test_arguments_come_back_as_they_were(arguments: dict[str, Any]) -> None:
    written = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    [[name, told]] = parse(f"Hm. {call(**written)}")[1:]
    assert name == "weather"
    assert json.loads(told) == arguments


@pytest.mark.parametrize(
    ("text", "kinds", "told"),
    [
        ("NaN", ["number"], '"NaN"'),
        ("1e5", ["number"], "1e5"),
        (" 3 ", ["integer"], "3"),
        ("3.5", ["integer"], "3.5"),
        ("None", ["null", "string"], "null"),
        ("None", ["string"], '"None"'),
        ("[" * 5000, [], json.dumps("[" * 5000)),
        ("{'a': (1, None)}", ["object"], '{"a": [1, null]}'),
        ("{'a': 1", ["object"], json.dumps("{'a': 1")),
        ("1", ["boolean"], "true"),
        ("FALSE", ["boolean", "null"], "false"),
        ("007", ["integer"], "7"),
        ("007", ["integer", "string"], '"007"'),
        ("+49", ["number", "string"], '"+49"'),
        ("49", ["integer", "string"], "49"),
        ("1E5", ["number", "string"], "1E5"),
        ("1", ["boolean", "string"], '"1"'),
        ("True", ["boolean", "string"], "true"),
        (".5", ["number"], "0.5"),
        ("inf", ["number"], '"inf"'),
        ("NULL", ["string", "null"], "null"),
        ("true", ["string"], '"true"'),
        ('{"a": "x\ny"}', ["object"], '{"a": "x\\ny"}'),
        ("9" * 5000, ["integer"], json.dumps("9" * 5000)),
    ],
)
def test_what_a_text_means(text: str, kinds: list[str], told: str) -> None:
    assert json_of(text, frozenset(kinds)) == told


def test_schemas_that_tell_nothing() -> None:
    circle = {"properties": {"a": {"$ref": "#/properties/a"}, "b": {"$ref": "#/nowhere"}, "c": True, "d": {"type": 5}}}
    assert [types_of(circle, name) for name in "abcde"] == [frozenset()] * 5
    assert types_of({"properties": []}, "a") == frozenset()
    assert types_of({"properties": {"a": {"type": ["string", "null"]}}}, "a") == {"string", "null"}
    assert types_of({"properties": {"a": {"const": 1.5}}}, "a") == {"number"}


def test_the_template_tells_of_it() -> None:
    tool_format = detect_tool_format("{{ '<tool_call>\\n<function=' + tool_call.name + '>' }}")
    assert tool_format is TOOL_FORMATS["qwen3_xml"]


# -- under a grammar, where tools are strict ---------------------------------------------------------------------------

XML = TOOL_FORMATS["qwen3_xml"]
STRICT = {**WEATHER, "required": ["city"], "additionalProperties": False}
OFFERED = [OfferedTool("weather", STRICT, strict=True), OfferedTool("stop", {})]
VOCABULARY = ByteVocabulary({"<tool_call>": 3})
TOKENIZER = LLTokenizer(TokenizerWrapper(VOCABULARY), eos_token=[VOCABULARY.eos_token_id])
FIRSTS = {
    parallel: LLMatcher(TOKENIZER, XML.grammar(OFFERED, {}, parallel=parallel), log_level=0)
    for parallel in (True, False)
}


def lets(text: str, *, parallel: bool = True) -> bool:
    matcher, ids = FIRSTS[parallel].deep_copy(), VOCABULARY(text.encode())
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_valid_calls_may_be_made_and_others_not() -> None:
    assert lets("Let me <see>.")
    assert lets(f"Well. {ROME}\n{call('stop', x='1')} Done.")
    assert lets(call(city='a\n\n<b> "c"', days="7", exact="true", tags='["a"]', unit="C", note="null", level="2.5"))
    assert lets("<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>")
    assert not lets(ROME.replace("</parameter>", "</parameter><parameter=more>\n1\n</parameter>"))
    wrong = [{"days": "7"}, {"city": "x", "days": "soon"}, {"city": "x", "unit": "K"}, {"city": "a\n<parameter=b>"}]
    for parameters in wrong:
        assert not lets(f"Well. {call('stop')}{call(**parameters)}"), parameters
    assert not lets(call("nobody"))
    token = XML.grammar(OFFERED, {"<tool_call>": 3}, parallel=True)
    behind = VOCABULARY(ROME.removeprefix("<tool_call>").encode())
    assert LLMatcher(TOKENIZER, token, log_level=0).try_consume_tokens([3, *behind]) == len(behind) + 1


PIECES = ["<tool_call>\n", "</tool_call>", "<function=weather>\n", "<function=stop>", "</function>\n", "\n", "hm", ROME]
PIECES += [f"<parameter={name}>\n" for name in ("city", "days", "unit", "more")]
PIECES += ["Rome", "7", "C", "\n</parameter>", "</parameter>", call(city="x", days="7"), call(city="x", days="y")]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_whatever_is_let_through_is_read_as_valid_calls(text: str) -> None:
    if not lets(text):
        return
    for name, arguments in (part for part in parse(text) if isinstance(part, list)):
        if name == "weather":
            jsonschema.validate(json.loads(arguments), STRICT)


@pytest.mark.parametrize(
    ("name", "schema", "why"),
    [
        ("a", {"anyOf": [{"type": "string", "pattern": "x"}, {"type": "null"}]}, "pattern of the string 'a'"),
        ("a", {"allOf": [{"enum": ["u", "v"]}, {"enum": ["v", "w"]}]}, "allOf of the string 'a'"),
        ("a", {"anyOf": [{"type": "string"}, {"type": "null"}], "maxLength": 3}, "maxLength of the string 'a'"),
        (
            "a",
            {"type": "string", "anyOf": [{"const": "x"}, {"type": "null"}]},
            "type of the string 'a' cannot stand beside",
        ),
        ("a", {"const": "zzz", "anyOf": [{"enum": ["u", "v"]}]}, "const of the string 'a' cannot stand beside"),
        ("a", {"type": "string", "enum": [1]}, "'a' must have a value, and its schema leaves none"),
        ("a", {"type": ["string", "integer"], "maximum": 3}, "'a' cannot be told from integer;"),
        ("a", {"anyOf": [{"type": "string"}, {"const": 1.5}, {"type": "null"}]}, "told from null or number;"),
        ("a<b", {"type": "integer"}, "cannot be named 'a<b'"),
        ("", {"type": "string"}, "cannot be named ''"),
    ],
)
def test_what_cannot_be_enforced_is_refused(name: str, schema: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        XML.grammar([OfferedTool("f", {"properties": {name: schema}}, strict=True)], {}, parallel=True)
    XML.grammar([OfferedTool("f", {"properties": {name: schema}})], {}, parallel=True)


def test_alternatives_are_followed() -> None:
    one = {"description": "one", "anyOf": [{"enum": ["u"]}, {"description": "same", "const": "v"}]}
    other = {"title": "other", "$ref": "#/$defs/text"}
    parameters = {"properties": {"a": one, "b": other}, "$defs": {"text": {"oneOf": [{"const": "w"}, {"const": "x"}]}}}
    grammar = XML.grammar([OfferedTool("f", parameters, strict=True)], {}, parallel=True)
    first = LLMatcher(TOKENIZER, grammar, log_level=0)
    for values, is_fine in (({"a": "u", "b": "w"}, True), ({"a": "w"}, False), ({"b": "u"}, False)):
        ids = VOCABULARY(call("f", **values).encode())
        assert (first.deep_copy().try_consume_tokens(ids) == len(ids)) is is_fine, values


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"type": "string", "enum": ["u", 1, None]}, {"u"}),
        ({"allOf": [{"enum": ["u", "v"]}]}, {"u", "v"}),
        ({"anyOf": [{"const": "u"}, {"type": "null"}]}, {"u", "null"}),
        ({"enum": ["u", "v"], "const": "v"}, {"v"}),
    ],
)
def test_only_values_that_are_named_may_be_given(schema: dict[str, Any], values: set[str]) -> None:
    grammar = XML.grammar([OfferedTool("f", {"properties": {"a": schema}}, strict=True)], {}, parallel=True)
    first = LLMatcher(TOKENIZER, grammar, log_level=0)
    for value in ("u", "v", "w", "null", "x"):
        ids = VOCABULARY(call("f", a=value).encode())
        assert (first.deep_copy().try_consume_tokens(ids) == len(ids)) is (value in values), value


@pytest.mark.parametrize("first", ["a0", "a1"])
def test_references_that_go_in_circles_or_multiply_are_refused_at_once(first: str) -> None:
    """Expanded they would be 30 ** 8 alternatives, more than memory holds; the plain parser reads them all the same."""
    one = {"anyOf": [{"$ref": f"#/$defs/{first}"}] * 30}
    places = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 30} for i in range(1, 7)}
    parameters = {"properties": {"a": one}, "$defs": {**places, "a0": one, "a7": {"type": "string"}}}
    strict = {**parameters, "properties": {"a": {"anyOf": [*one["anyOf"], {"type": "string"}]}}}
    with pytest.raises(InvalidRequestError, match="at most 1024 alternatives"):
        XML.grammar([OfferedTool("f", strict, strict=True)], {}, parallel=True)
    assert types_of(parameters, "a") == (frozenset() if first == "a0" else {"string"})
