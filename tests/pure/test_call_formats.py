"""Calls in the formats of single families: found in any pieces, and whatever is no call stays content."""

from __future__ import annotations

import itertools
import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.tools.formats import TOOL_FORMATS
from engine.text.tools.python_literals import LiteralReader, json_of_literal
from engine.text.types import CallArguments, CallBegin
from tests.pure.calls import check_in_pieces, parsed

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "where": {"type": "object"},
        "unit": {"enum": ["C", "F"]},
        "note": {"type": ["string", "null"]},
    },
    "required": ["city"],
}
TOOLS: dict[str, dict[str, Any]] = {"weather": WEATHER, "stop": {}}
ROME = '{"city": "Rome"}'
CALLED = ["weather", ROME]


def parse(tool_format: str, *texts: str) -> list[Any]:
    """Content as strings, calls as [name, arguments]."""
    return parsed(TOOL_FORMATS[tool_format].parser(TOOLS), *texts)


K_BEGIN, K_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
D_BEGIN, D_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def kimi(arguments: str, name: str = "functions.weather:0") -> str:
    return f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def v3(arguments: str, name: str = "weather") -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def v31(arguments: str, name: str = "weather") -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def glm(name: str = "weather", *, br: str = "\n", **values: str) -> str:
    members = "".join(f"<arg_key>{key}</arg_key>{br}<arg_value>{text}</arg_value>{br}" for key, text in values.items())
    return f"<tool_call>{name}{br}{members}</tool_call>"


def gemma(arguments: str, name: str = "weather") -> str:
    return f"<|tool_call>call:{name}{{{arguments}}}<tool_call|>"


GOOD = [
    ("kimi_k2", f"{K_BEGIN}{kimi(ROME)}{K_END}", [CALLED]),
    ("kimi_k2", f"So.\n{K_BEGIN}{kimi(ROME)}{kimi('{}', 'functions.stop:1')}{K_END} Done.", ["So.", CALLED, ["stop", "{}"], " Done."]),
    ("kimi_k2", f"{K_BEGIN}\n{kimi(' ' + ROME + ' ', ' functions.weather:12 ')}\n{K_END}", [CALLED]),
    ("kimi_k2", f"{K_BEGIN}{kimi(ROME).removesuffix('<|tool_call_end|>')}{K_END}", [CALLED]),  # an end forgotten
    ("kimi_k2", f"{K_BEGIN}{kimi(ROME).removesuffix('<|tool_call_end|>')}{kimi(ROME)}", [CALLED] * 2),
    ("kimi_k2", kimi(ROME), [CALLED]),  # the section's marks forgotten
    ("kimi_k2", f"{K_BEGIN}{kimi('', 'functions.stop:0')}{K_END}", [["stop", "{}"]]),
    ("kimi_k2", f"{K_BEGIN}{kimi(ROME, 'weather')}{K_END}", [CALLED]),  # an id that is a tool's name
    ("kimi_k2", f"{K_BEGIN}{kimi(ROME, 'functions.a.b-c:3')}{K_END}", [["a.b-c", ROME]]),
    ("kimi_k2", f"{K_BEGIN}{kimi(ROME)[:-21]}", [["weather", ROME[:-4]]]),  # cut short
    ("kimi_k2", f"{K_BEGIN}{kimi('{oops}')}{K_END}!", [["weather", "{oops}"], "!"]),
    ("kimi_k2", f"{K_BEGIN}{kimi('{[}')}{kimi(ROME)}{K_END}", [["weather", "{[}"], CALLED]),
    ("deepseek_v3", f"{D_BEGIN}{v3(ROME)}{D_END}", [CALLED]),
    ("deepseek_v3", f"So.\n\n{D_BEGIN}{v3(ROME)}\n{v3('{}', 'stop')}{D_END}", ["So.", CALLED, ["stop", "{}"]]),
    ("deepseek_v3", D_BEGIN + v3('{\n  "city": "Ro```me"\n}'), [["weather", '{\n  "city": "Ro```me"\n}']]),
    ("deepseek_v3", f"{D_BEGIN}{v3(ROME)[:-21]}", [CALLED]),  # cut within the fence
    ("deepseek_v3", f"{D_BEGIN}{v3(ROME)}{D_END} Done.", [CALLED, " Done."]),
    ("deepseek_v3", f"{D_BEGIN}{v3('{[}')}\n{v3(ROME)}{D_END}", [["weather", "{[}\n```"], CALLED]),
    ("deepseek_v31", f"{D_BEGIN}{v31(ROME)}{v31('{}', 'stop')}{D_END}", [CALLED, ["stop", "{}"]]),
    ("deepseek_v31", f"{D_BEGIN}{v31(ROME)}", [CALLED]),
    ("glm45", "\n" + glm(city="Rome"), [CALLED]),
    ("glm45", glm(city="Rome", br=""), [CALLED]),
    ("glm47", f"So.\n{glm(city='Rome')}\n{glm('stop')}{glm('stop', br='')} Done.", ["So.", CALLED, ["stop", "{}"], ["stop", "{}"], " Done."]),
    ("glm4_moe", glm(city='7\n<b> "\\" ', days="3", exact="True", tags='["a"]', where="{'x': None}", unit="C", note="null"),
     [["weather", json.dumps({"city": '7\n<b> "\\" ', "days": 3, "exact": True, "tags": ["a"], "where": {"x": None}, "unit": "C", "note": None})]]),
    ("glm45", "<tool_call>weather<arg_key> city </arg_key> \n <arg_value>Rome</arg_value></tool_call>", [CALLED]),
    ("glm45", "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</tool_call>", [CALLED]),
    ("glm45", "<tool_call>weather<arg_key>city</arg_key><arg_value>Ro", [["weather", '{"city": "Ro']]),
    ("glm45", "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>da", [CALLED]),
    ("glm45", "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>", [CALLED]),
    ("glm45", "<tool_call>stop<arg_key>a", [["stop", "{}"]]),
    ("glm45", "<tool_call>stop</tool_call></tool_call>", [["stop", "{}"], "</tool_call>"]),
    ("gemma4", gemma('city:<|"|>Rome<|"|>'), [CALLED]),
    ("gemma4", "So.\n" + gemma('city:<|"|>Rome<|"|>') + "\n" + gemma("", "stop") + gemma("", "a.b-c") + " Done.",
     ["So.", CALLED, ["stop", "{}"], ["a.b-c", "{}"], " Done."]),
    ("gemma4", gemma('city:<|"|>7\n{,"\\}<|"|>,days:-3,exact:true,tags:[<|"|>a<|"|>,<|"|><|"|>],where:{x:null,<|"|>y z<|"|>:[1.5,{}]},note:null'),
     [["weather", json.dumps({"city": '7\n{,"\\}', "days": -3, "exact": True, "tags": ["a", ""], "where": {"x": None, "y z": [1.5, {}]}, "note": None})]]),
    ("gemma4", gemma(' "city" : "Rome" '), [CALLED]),  # as JSON
    ("gemma4", gemma('city:<|"|>Rome<|"|>').removesuffix("<tool_call|>"), [CALLED]),
    ("gemma4", '<|tool_call>call:weather{city:<|"|>Ro<|', [["weather", '{"city": "Ro']]),
    ("gemma4", '<|tool_call>call:weather{city:<|"|>Rome<|"|>,da', [["weather", ROME[:-1]]]),
    ("gemma4", gemma("city:rome,days:2") + "!", [["weather", '{"city": rome,days:2}'], "!"]),  # a fault stays in the arguments
    ("gemma4", gemma("city:rome").removesuffix("}<tool_call|>") + gemma("", "stop"), [["weather", '{"city": rome'], ["stop", "{}"]]),  # up to the next call
    ("granite", f'<|tool_call|>[{{"name": "weather", "arguments": {ROME}}}, {{"name": "stop", "arguments": {{}}}}]', [CALLED, ["stop", "{}"]]),
    ("granite", f'So. <tool_call> [{{"name": "weather", "arguments": {ROME}}}] Done.', ["So.", CALLED, " Done."]),
    ("granite", f'<|tool_call|>[{{"name": "weather", "arguments": {ROME}', [CALLED]),
    ("granite4", f'<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>', [CALLED]),
    ("nemotron_json", f'So.\n<TOOLCALL>[{{"name": "weather", "arguments": {ROME}}}, {{"name": "stop", "arguments": {{}}}}]</TOOLCALL>', ["So.", CALLED, ["stop", "{}"]]),
    ("granite-20b-fc", f'<function_call> {{"name": "weather", "arguments": {ROME}}}<function_call> {{"name": "stop", "arguments": {{}}}}', [CALLED, ["stop", "{}"]]),
    ("llama4_json", f'<|python_start|>{{"name": "weather", "parameters": {ROME}}}<|python_end|>', [CALLED]),
    ("pythonic", '[weather(city="Rome")]', [CALLED]),
    ("pythonic", " \n[weather( city = 'Rome' ), stop( )]", [CALLED, ["stop", "{}"]]),
    ("pythonic", r"""[weather(city='a"b\'\n\x41\101\u00e9\N{BULLET}\d', days=-3, exact=True, tags=["x", 'y',], where={'a': (1, None), 2: .5}, note=None)]""",
     [["weather", json.dumps({"city": 'a"b\'\nAAé•\\d', "days": -3, "exact": True, "tags": ["x", "y"], "where": {"a": [1, None], "2": 0.5}, "note": None}, ensure_ascii=False)]]),
    ("pythonic", '[weather(city="""a\n"b" """, note=\'\', days=0x1F)]', [["weather", '{"city": "a\\n\\"b\\" ", "note": "", "days": 31}']]),
    ("pythonic", "[weather(city=r'\\n', note=f'{x}', unit=u'C')]", [["weather", '{"city": "\\\\n", "note": "{x}", "unit": "C"}']]),
    ("pythonic", "[weather(city='[(,)]', tags=[])]", [["weather", '{"city": "[(,)]", "tags": []}']]),
    ("pythonic", "[weather(city='x\ny', from=1)]", [["weather", '{"city": "x\\ny", "from": 1}']]),
    ("pythonic", "[weather(city='Ro", [["weather", '{"city": "Ro']]),
    ("pythonic", "[weather(city='Rome', da", [["weather", ROME[:-1]]]),
    ("pythonic", "[weather(city='Rome')", [CALLED]),
    ("pythonic", "[weather(city=rome)]", [["weather", '{"city": rome)]']]),  # a fault stays in the arguments
    ("pythonic", "[weather(city='Rome' + 'x')]", [["weather", ROME[:-1] + "+ 'x')]"]]),
    ("pythonic", "[weather(city='Rome')] Done.", [CALLED, " Done."]),
    ("pythonic", "[weather(city='Rome'), unheard_of(a=1)]", [CALLED, ", unheard_of(a=1)]"]),
    ("llama4_pythonic", "<|python_start|>[weather(city='Rome'), new.tool(a=1)]<|python_end|>", [CALLED, ["new.tool", '{"a": 1}']]),
    ("llama4_pythonic", "[weather(city='Rome')]", [CALLED]),
    ("llama4_pythonic", "<|python_start|>[weather(city=oops)]<|python_end|>!", [["weather", '{"city": oops)]'], "!"]),
    ("lfm2", "<|tool_call_start|>[weather(city='Rome'), stop()]<|tool_call_end|>I look.", [CALLED, ["stop", "{}"], "I look."]),
    ("lfm2", "So. <|tool_call_start|>[weather(city='it\\'s', exact=true, where={\"a\": null})]<|tool_call_end|>",
     ["So.", ["weather", '{"city": "it\'s", "exact": true, "where": {"a": null}}']]),
    ("lfm2", "[weather(city='Rome')]", [CALLED]),
    ("lfm2", "<|tool_call_start|>[weather(city=rome<|tool_call_start|>[stop()]<|tool_call_end|>", [["weather", '{"city": rome'], ["stop", "{}"]]),
    ("olmo3", "So.\n<function_calls>\nweather(city='Rome')\nstop()\n</function_calls> Done.", ["So.", CALLED, ["stop", "{}"], " Done."]),
    ("olmo3", "<function_calls>weather(city='Rome')</function_calls>", [CALLED]),
]  # fmt: skip

CONTENT = [
    ("kimi_k2", f"{K_BEGIN}get the weather{K_END}"),
    ("kimi_k2", f"{K_BEGIN}{kimi(ROME, 'tool_call_1')}"),
    ("kimi_k2", f"so {K_BEGIN}\n<|tool_call_begin|>functions.weather:0<|tool_call_arg"),
    ("kimi_k2", f"{K_BEGIN}<|tool_call_begin|>" + "x" * 400),
    ("kimi_k2", "a < b <|tool_ca"),
    ("deepseek_v3", f"{D_BEGIN}weather{D_END}"),
    ("deepseek_v3", D_BEGIN),
    ("deepseek_v31", f"{D_BEGIN}<｜tool▁call▁begin｜>{ROME}<｜tool▁call▁end｜>"),
    ("glm45", "<tool_call>get the weather</tool_call>"),
    ("glm45", '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'),
    ("glm45", glm("unheard_of", a="1")),
    ("glm45", "<tool_call>weather<b>"),
    ("glm45", "<tool_call>weather\n"),
    ("gemma4", "<|tool_call>weather{}<tool_call|>"),
    ("gemma4", "<|tool_call>call:weather<tool_call|>"),
    ("gemma4", "<|tool_call>call:wea"),
    ("granite", "<|tool_call|> get the weather"),
    ("granite", "[1, 2]"),
    ("pythonic", "[a link](https://weather(city=1))"),
    ("pythonic", "[weather] is (what) follows"),
    ("pythonic", "[unheard_of(a=1)]"),
    ("pythonic", "[weather('Rome')]"),
    ("pythonic", "[weather(city=='Rome')]"),
    ("pythonic", "I call [weather(city='Rome')]"),
    ("pythonic", " [weather(ci"),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "["),
    ("llama4_pythonic", "<|python_start|>print(1)<|python_end|>"),
    ("lfm2", '<|tool_call_start|>[{"name": "weather"}]<|tool_call_end|>'),
    ("olmo3", "[weather(city='Rome')]"),
    ("olmo3", "<function_calls>\n<invoke>"),
]


@pytest.mark.parametrize(("tool_format", "text", "expected"), GOOD)
def test_calls_in_any_two_pieces_and_letter_by_letter(tool_format: str, text: str, expected: list[Any]) -> None:
    check_in_pieces(partial(parse, tool_format), text, expected)


@pytest.mark.parametrize(("tool_format", "text"), CONTENT)
def test_what_is_no_call_is_content_exactly(tool_format: str, text: str) -> None:
    check_in_pieces(partial(parse, tool_format), text, [text])


WORDS = {
    "kimi_k2": [K_BEGIN, K_END, "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", kimi(ROME), "functions.weather:0"],
    "deepseek_v3": [D_BEGIN, D_END, "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "```json", "```", v3(ROME), "function"],
    "deepseek_v31": [D_BEGIN, D_END, "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", v31(ROME)],
    "glm45": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "city", glm(city="x")],
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>', "call:", "city:", "null", "-1.5", gemma('city:<|"|>x<|"|>')],
    "granite": ["<|tool_call|>", "<tool_call>", f'{{"name": "weather", "arguments": {ROME}}}'],
    "pythonic": ["weather(", "stop()", "city=", "days=", "'", '"""', "\\", "True", "-1.5e3", "r'", "\\u00e", "weather(city='Rome')"],
    "llama4_pythonic": ["<|python_start|>", "<|python_end|>", "weather(", "city=", "'Rome'", "stop()"],
    "lfm2": ["<|tool_call_start|>", "<|tool_call_end|>", "weather(", "city=", "'Rome'", "stop()"],
    "olmo3": ["<function_calls>", "</function_calls>", "weather(", "city=", "'Rome'", "stop()"],
}  # fmt: skip
COMMON = [*"{}[]():,=<\"'\n\\ 1x", "weather", "stop", ROME, "é", "\ud800", "\x00"]


@settings(max_examples=200)
@given(st.sampled_from(sorted(WORDS)), st.data())
def test_any_pieces_give_the_same_and_what_has_no_call_is_content(tool_format: str, data: Any) -> None:
    words = st.sampled_from(WORDS[tool_format]) | st.sampled_from(COMMON)
    text = "".join(data.draw(st.lists(words, max_size=24)))
    if tool_format == "pythonic":
        text = "[" + text
    whole = parse(tool_format, text)
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8))), len(text)]
    assert parse(tool_format, *(text[i:j] for i, j in itertools.pairwise(edges))) == whole
    assert parse(tool_format, *text) == whole
    if not any(isinstance(part, list) for part in whole):
        assert "".join(whole) == text


def test_strings_come_as_they_are_written() -> None:
    parser = TOOL_FORMATS["pythonic"].parser(TOOLS)
    assert parser.push("[weather(c") == []
    assert parser.push("ity='Ro") == [CallBegin("weather"), CallArguments('{"city": "Ro')]
    assert parser.push("me\\") == [CallArguments("me")]
    assert parser.push("n'") == [CallArguments('\\n"')]
    assert parser.push(")") == [CallArguments("}")]
    parser = TOOL_FORMATS["glm45"].parser(TOOLS)
    assert parser.push("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ro") == [
        CallBegin("weather"), CallArguments('{"city": "Ro')
    ]  # fmt: skip
    assert parser.push("me</arg") == [CallArguments("me")]
    assert parser.push("_value>\n</tool_call>") == [CallArguments('"}')]


def test_kimis_calls_have_the_ids_that_the_model_gave_them() -> None:
    parser = TOOL_FORMATS["kimi_k2"].parser(TOOLS)
    pieces = parser.push(f"{K_BEGIN}{kimi(ROME, 'functions.weather:7')}{kimi('{}', 'functions.weather:7')}{K_END}")
    assert [piece.id for piece in pieces if isinstance(piece, CallBegin)] == ["functions.weather:7", ""]


documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(documents, st.integers(0, 80))
def test_literals_of_python_become_json(document: Any, cut: int) -> None:
    text = repr(document)
    written = json_of_literal(text)
    assert written is not None
    assert json.loads(written) == document
    reader = LiteralReader()
    first, rest = reader.read(text[:cut])
    assert first + reader.read(rest + text[cut:] + ",")[0] == written
    assert reader.is_done


@pytest.mark.parametrize("text", ["nan", "1j", "[1", "{1, 2}", "[,]", "{'a'}", "x", "1 2", "f(x)", "9" * 5000, "inf"])
def test_other_python_is_no_literal(text: str) -> None:
    assert json_of_literal(text) is None


@given(st.text(alphabet="[](){},:'\"\\rufxN01.e-TrueNon \n", max_size=30))
def test_what_is_read_as_a_literal_is_json(text: str) -> None:
    written = json_of_literal(text)
    if written is not None:
        json.loads(written)
