"""Calls of tools found in text: every family's way of writing them, in any pieces, and nothing lost where it goes wrong."""

from __future__ import annotations

import itertools
import json
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.text.tools.formats import TOOL_FORMATS
from engine.text.tools.json_arguments import JsonScanner
from engine.text.tools.json_calls import FORCED, JsonFormat
from engine.text.types import CallArguments, CallBegin, Content
from tests.pure.calls import check_in_pieces, merge, parsed

TOOLS: dict[str, dict[str, Any]] = {"weather": {}, "add": {}}
PARIS = '{"city": "Paris"}'
CALL = '{"name": "weather", "arguments": ' + PARIS + "}"
LLAMA_CALL = '{"name": "weather", "parameters": ' + PARIS + "}"


def parse(tool_format: str, *texts: str) -> list[Any]:
    return parsed(TOOL_FORMATS[tool_format].parser(TOOLS), *texts)


GOOD = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", [["weather", PARIS]]),
    ("hermes", f"Let me look.\n<tool_call>{CALL}</tool_call>\n", ["Let me look.", ["weather", PARIS]]),
    ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", [["weather", PARIS]] * 2),
    ("hermes", f"<tool_call>{CALL}</tool_call> Done.", [["weather", PARIS], " Done."]),
    ("hermes", f"<tool_call>\n{CALL}", [["weather", PARIS]]),  # the end token came before the end mark
    ("hermes", f"<tool_call>[{CALL}, {CALL}]</tool_call>", [["weather", PARIS]] * 2),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "new-tool"}</tool_call>', [["new-tool", '{"a": 1}']]),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', [["add", "{}"]]),
    ("hermes", f'<tool_call>{{"name": "{"x" * 128}", "arguments": {{}}}}</tool_call>', [["x" * 128, "{}"]]),
    ("hermes", '<tool_call>{"name": "add", "arguments": null}</tool_call>', [["add", "{}"]]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [["add", '{"a": 1}']]),
    ("hermes", f'<tool_call>{{"id": 7, "name": "weather", "arguments": {PARIS}}}</tool_call>', [["weather", PARIS]]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "x\ny"}}</tool_call>', [["add", '{"a": "x\\ny"}']]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}}', [["add", '{"a": "</tool_call>"}']]),
    ("hermes", f'<tool_call>{CALL[:-1]}</tool_call>ok', [["weather", PARIS], "ok"]),  # a brace forgotten
    ("llama3_json", LLAMA_CALL, [["weather", PARIS]]),
    ("llama3_json", f"<|python_tag|>{LLAMA_CALL}; {LLAMA_CALL}", [["weather", PARIS]] * 2),
    ("llama3_json", f" {LLAMA_CALL}\n;{LLAMA_CALL} ", [["weather", PARIS]] * 2),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", [["weather", PARIS]] * 2),
    ("mistral", f"[TOOL_CALLS] [{CALL}] so", [["weather", PARIS], " so"]),
    ("mistral", f"Yes.[TOOL_CALLS]weather{PARIS}[TOOL_CALLS]add {{}}", ["Yes.", ["weather", PARIS], ["add", "{}"]]),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{PARIS}", [["weather", PARIS]]),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]abcdef123[ARGS]{PARIS}[TOOL_CALLS]add[CALL_ID]x1 {{}}", [["weather", PARIS], ["add", "{}"]]),
    ("json", f"[{CALL},\n{LLAMA_CALL}]", [["weather", PARIS]] * 2),
    ("json", f"Here it is:\n```json\n{CALL}\n```", ["Here it is:", ["weather", PARIS]]),
    ("json", f"<|tool_call|>[{CALL}]<|/tool_call|>", [["weather", PARIS]]),
]  # fmt: skip

# What is no call is content, to the last space.
CONTENT = [
    ("hermes", "just words, a < b, <tool_"),
    ("hermes", " spaces \n around \n"),
    ("hermes", "<tool_call>get the weather</tool_call>"),
    ("hermes", 'so <tool_call>\n{"name": "weather", }</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": 12345, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "' + "x" * 129 + '"}'),
    ("hermes", '<tool_call>{"name": "a", "arguments": "{\\"\\ud800\\"}"}'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": NaN}, "name": "add"}</tool_call>'),  # which is no JSON
    ("hermes", "<tool_call>[]</tool_call>"),
    ("hermes", "<tool_call>\n"),
    ("hermes", '<tool_call>{"name": "wea'),
    ("llama3_json", '{"name": "Alice", "parameters": {}}'),
    ("llama3_json", '{"city": "Paris"}'),
    ("llama3_json", "<|python_tag|>weather.call(city='Paris')"),
    ("llama3_json", f"The JSON is {LLAMA_CALL}"),
    ("mistral", "[TOOL_CALLS] [get the weather]"),
    ("mistral", "[TOOL_CALLS]weather: Paris"),
    ("mistral", "[TOOL_CALLS]weather[AR"),
    ("mistral", "[TOOL_CALLS]weather[CALL_ID]abc[AR"),
    ("mistral", "[TOOL_CALLS]weather[CALL_ID]a b"),
    ("json", '```json\n{"name": "Alice"}\n```'),
    ("json", '[{"age": 3}]'),
]

# What goes wrong once the arguments have begun stays in them.
LATE = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": oops}}</tool_call>!', [["add", '{"a": oops}'], "!"]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', [["add", '{"a": 1']]),
    ("mistral", '[TOOL_CALLS]add{"a" 1}[TOOL_CALLS]add{}', [["add", '{"a" 1}'], ["add", "{}"]]),
    ("llama3_json", '{"name": "add", "parameters": {"a": \'b\'}}', [["add", "{\"a\": 'b'}}"]]),
    ("hermes", f"<tool_call>{CALL}}}</tool_call>", [["weather", PARIS], "}</tool_call>"]),
]


@pytest.mark.parametrize(("tool_format", "text", "expected"), GOOD + LATE)
def test_calls_in_any_two_pieces_and_letter_by_letter(tool_format: str, text: str, expected: list[Any]) -> None:
    check_in_pieces(partial(parse, tool_format), text, expected)


@pytest.mark.parametrize(("tool_format", "text"), CONTENT)
def test_what_is_no_call_is_content_exactly(tool_format: str, text: str) -> None:
    check_in_pieces(partial(parse, tool_format), text, [text])


def test_arguments_come_as_they_are_written_and_never_before_the_name() -> None:
    parser = TOOL_FORMATS["hermes"].parser(TOOLS)
    text = f"<tool_call>{CALL}</tool_call>"
    after = text.index(PARIS)
    assert parser.push(text[:after]) == []
    assert parser.push(PARIS[:9]) == [CallBegin("weather"), CallArguments(PARIS[:9])]
    assert parser.push(PARIS[9:12]) == [CallArguments(PARIS[9:12])]


def test_text_waits_no_longer_than_it_must() -> None:
    parser = TOOL_FORMATS["hermes"].parser(TOOLS)
    assert parser.push("a <b") == [Content("a <b")]
    assert parser.push("c <tool") == [Content("c")]
    assert parser.push("s>") == [Content(" <tools>")]


def test_calls_that_a_grammar_forces_need_no_marks() -> None:
    parser = FORCED.parser(TOOLS)
    assert merge(parser.push(f"[{CALL}, {CALL}]") + parser.finish()) == [["weather", PARIS]] * 2


WORDS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|python_tag|>",
    "```json",
    "```",
    CALL,
    LLAMA_CALL,
]
WORDS += [PARIS, '"name"', '"arguments"', '"weather"', "weather", "null", "é", "\ud800", "\x00", *'{}[]:,;" \n\\u1e-.']
texts = st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=24).map("".join)


@given(
    st.sampled_from(sorted({each.name for each in TOOL_FORMATS.values() if isinstance(each, JsonFormat)})),
    texts,
    st.data(),
)
@example("hermes", "<tool_call>" * 3, None)
def test_any_pieces_give_the_same_and_no_character_is_lost(tool_format: str, text: str, data: Any) -> None:
    whole = parse(tool_format, text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8))) if data is not None else []
    edges = [0, *cuts, len(text)]
    assert parse(tool_format, *(text[i:j] for i, j in itertools.pairwise(edges))) == whole
    if not any(isinstance(part, list) for part in whole):
        assert "".join(whole) == text
    elif not any(char < " " or char == "\\" for char in text):
        characters = iter(text)
        given = (part if isinstance(part, str) else part[1] for part in whole if part[1:] != ["{}"])
        assert all(char in characters for part in given for char in part), "not in the order of the text"


documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), documents, max_size=3), st.sampled_from([None, 1]), st.booleans())
def test_an_object_is_done_at_its_last_character(
    document: dict[str, Any], indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(document, indent=indent, ensure_ascii=ascii_only)
    scanner = JsonScanner()
    for char in text[:-1]:
        assert scanner.read(char) == (char, "")
        assert not scanner.is_done
    assert scanner.read(text[-1] + "}") == ("}", "}")
    assert scanner.is_done


@given(st.text(alphabet='{}[]:,"\\u0019e.-+truefalsn \n\x01<', max_size=12).map("{".__add__))
def test_the_scanner_ends_where_json_ends(text: str) -> None:
    """A fault within brackets shows at the latest where they end; control characters in strings are mended."""
    scanner, written = JsonScanner(), ""
    for end, char in enumerate(text, 1):
        fed, _ = scanner.read(char)
        written += fed
        try:
            whole = isinstance(json.loads(text[:end], strict=False), dict)
        except ValueError:
            whole = False
        assert scanner.is_done or not whole
        if whole:
            json.loads(written)
        if scanner.is_faulty or scanner.is_done:
            return


@given(st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), st.dictionaries(st.text(max_size=5), documents, max_size=3)), min_size=1, max_size=3))  # fmt: skip
def test_calls_come_back_as_they_were_written(calls: list[tuple[str, dict[str, Any]]]) -> None:
    for tool_format, key in (("hermes", "arguments"), ("mistral", "arguments"), ("llama3_json", "parameters")):
        written = [json.dumps({"name": name, key: arguments}) for name, arguments in calls]
        text = {
            "hermes": "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written),
            "mistral": f"[TOOL_CALLS][{', '.join(written)}]",
            "llama3_json": "; ".join(written),
        }[tool_format]
        assert parse(tool_format, text) == [[name, json.dumps(arguments)] for name, arguments in calls]
