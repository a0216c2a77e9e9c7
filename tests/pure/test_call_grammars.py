"""Grammars of calls in the formats of single families: forced ones, and strict ones in free text."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from tokenizers import AddedToken, Tokenizer

from engine.core.errors import InvalidRequestError
from engine.text.channels import MARKS
from engine.text.grammars.spec import MAX_TEXT, GrammarSpec, drop_annotations
from engine.text.tokenizer import TextTokenizer, TokenizerConfig
from engine.text.tools.formats import TOOL_FORMATS
from engine.text.tools.json_calls import FORCED, forced_grammar
from engine.text.tools.tool_format import OfferedTool
from engine.text.types import CallArguments, CallBegin
from tests.pure.byte_vocabulary import NUM_BYTES, ByteVocabulary, byte_tokenizer_json

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
NAMES = [
    "gemma4",
    "kimi_k2",
    "deepseek_v3",
    "deepseek_v31",
    "glm45",
    "qwen3_coder",
    "granite",
    "granite-20b-fc",
    "hermes",
    "nemotron_json",
]
NAMES += ["pythonic", "llama4_pythonic", "olmo3", "lfm2", "harmony"]
MARKUP = sorted({mark for name in NAMES for mark in TOOL_FORMATS[name].markup} | set(MARKS))
SPECIAL = {mark: 10 + place for place, mark in enumerate(MARKUP)}
SPLIT = re.compile("(" + "|".join(map(re.escape, MARKUP)) + ")")


def call(name: str, function: str, **arguments: Any) -> str:
    """One call as a model writes it, without what is around all calls."""
    text = json.dumps(arguments, ensure_ascii=False)
    plain = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    python = ", ".join(
        f"{key}={json.dumps(v, ensure_ascii=False) if isinstance(v, str) else v}" for key, v in arguments.items()
    )
    listed = f'{{"name": "{function}", "arguments": {text}}}'
    glm = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in plain.items())
    gemma = ",".join(f'{k}:<|"|>{v}<|"|>' if isinstance(arguments[k], str) else f"{k}:{v}" for k, v in plain.items())
    xml = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in plain.items())
    return {
        "kimi_k2": f"<|tool_call_begin|>functions.{function}:0<|tool_call_argument_begin|>{text}<|tool_call_end|>",
        "deepseek_v3": f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{function}\n```json\n{text}\n```<｜tool▁call▁end｜>",
        "deepseek_v31": f"<｜tool▁call▁begin｜>{function}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>",
        "glm45": f"<tool_call>{function}\n{glm}</tool_call>",
        "gemma4": f"<|tool_call>call:{function}{{{gemma}}}<tool_call|>",
        "qwen3_coder": f"<tool_call>\n<function={function}>\n{xml}</function>\n</tool_call>",
        "hermes": f"<tool_call>\n{listed}\n</tool_call>",
        "harmony": f"<|channel|>commentary to=functions.{function} <|constrain|>json<|message|>{text}",
    }.get(name, listed if name.startswith(("granite", "nemotron")) else f"{function}({python})")


AROUND = {  # the texts before, between and after calls
    "kimi_k2": ("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
    "glm45": ("", "\n", ""),
    "gemma4": ("", "", ""),
    "qwen3_coder": ("", "\n", ""),
    "hermes": ("", "\n", ""),
    "granite": ("<|tool_call|>[", ", ", "]"),
    "nemotron_json": ("<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    "granite-20b-fc": ("<function_call> ", "\n<function_call> ", ""),
    "pythonic": ("[", ", ", "]"),
    "llama4_pythonic": ("<|python_start|>[", ", ", "]<|python_end|>"),
    "lfm2": ("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "olmo3": ("<function_calls>", "\n", "</function_calls>"),
    "harmony": ("", "<|end|><|start|>assistant", ""),
}


def calls(name: str, *written: str) -> str:
    before, between, after = AROUND[name]
    return before + between.join(written) + after


def special_tokens(name: str, *, are_tokens: bool) -> dict[str, int]:
    markup = MARKS if name == "harmony" else TOOL_FORMATS[name].markup
    return {mark: SPECIAL[mark] for mark in markup} if are_tokens else {}


@cache
def matcher(name: str, kind: str, *, are_tokens: bool, is_strict: bool = True) -> tuple[LLMatcher, ByteVocabulary]:
    special = special_tokens(name, are_tokens=are_tokens)
    tools = [OfferedTool("weather", WEATHER, strict=is_strict), OfferedTool("stop", {})]
    if kind == "free":
        grammar = TOOL_FORMATS[name].grammar(tools, special, parallel=True)
    else:
        grammar, tool_format = forced_grammar(
            tools, TOOL_FORMATS[name], special, max_calls=1 if kind == "one" else None
        )
        assert tool_format is TOOL_FORMATS[name]
    vocabulary = ByteVocabulary(special)
    tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=[vocabulary.eos_token_id])
    made = LLMatcher(tokenizer, grammar, log_level=0)
    assert not made.is_error(), made.get_error()
    return made, vocabulary


def lets(name: str, kind: str, text: str, *, are_tokens: bool, is_strict: bool = True) -> bool:
    first, vocabulary = matcher(name, kind, are_tokens=are_tokens, is_strict=is_strict)
    special = special_tokens(name, are_tokens=are_tokens)
    ids: list[int] = []
    for part in SPLIT.split(text):
        ids += [special[part]] if part in special else vocabulary(part.encode())
    made = first.deep_copy()
    return made.try_consume_tokens(ids) == len(ids) and made.is_accepting()


def read(name: str, text: str) -> list[tuple[str, Any]]:
    parser = TOOL_FORMATS[name].parser({"weather": WEATHER, "stop": {}})
    found: list[tuple[str, str]] = []
    for piece in parser.push(text) + parser.finish():
        if isinstance(piece, CallBegin):
            found.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            found[-1] = (found[-1][0], found[-1][1] + piece.text)
    return [(function, json.loads(arguments)) for function, arguments in found]


GOOD = [{"city": "Rome", "unit": "C"}, {"city": 'a "b" <c> é', "days": 3, "exact": True, "unit": "F"}]
WRONG = [{"city": "Rome", "unit": "K"}, {"city": "Rome", "unit": "C", "more": 1}, {"city": "Rome"}, {"city": "Rome", "days": "x", "unit": "C"}]  # fmt: skip
FORMS = [(name, tokens) for name in NAMES for tokens in (False, True) if tokens or name != "harmony"]


@pytest.mark.parametrize(("name", "are_tokens"), FORMS)
def test_forced_calls_are_nothing_but_valid_calls_in_the_models_format(name: str, are_tokens: bool) -> None:
    bare = "pythonic" if name == "llama4_pythonic" else name  # its mark is left out
    for arguments in GOOD:
        one = calls(bare, call(name, "weather", **arguments))
        for kind in ("one", "some"):
            for is_strict in (True, False):
                assert lets(name, kind, one, are_tokens=are_tokens, is_strict=is_strict), one
        assert read(name, one) == [("weather", arguments)]
    two = calls(bare, call(name, "weather", **GOOD[0]), call(name, "stop"))
    assert lets(name, "some", two, are_tokens=are_tokens) == (name != "harmony")  # its first call ends the turn
    assert not lets(name, "one", two, are_tokens=are_tokens)
    assert read(name, two) == [("weather", GOOD[0]), ("stop", {})]
    for text in ("", "words", f"So. {one}", calls(bare, call(name, "other"))):
        assert not lets(name, "some", text, are_tokens=are_tokens), text
    for wrong in WRONG:
        for is_strict in (True, False):
            text = calls(bare, call(name, "weather", **wrong))
            assert not lets(name, "one", text, are_tokens=are_tokens, is_strict=is_strict), text


@pytest.mark.parametrize(("name", "are_tokens"), FORMS)
def test_text_is_free_and_calls_of_strict_tools_in_it_are_valid(name: str, are_tokens: bool) -> None:
    good = calls(name, call(name, "weather", **GOOD[1]), call(name, "stop", x=1))
    is_bare = name in ("pythonic", "harmony")  # calls begin an answer, or a message
    said = "<|channel|>final<|message|>{}" if name == "harmony" else "{}"
    for text in ("", "words [and] 1 < 2 {3}", "[a link](b)"):
        assert lets(name, "free", said.format(text), are_tokens=are_tokens), text
    for text in (good, *(() if is_bare else (f"So. {good}",))):
        assert lets(name, "free", text, are_tokens=are_tokens), text
    for wrong in WRONG:
        text = calls(name, call(name, "stop", x=1), call(name, "weather", **wrong))
        assert not lets(name, "free", text, are_tokens=are_tokens), text
        assert is_bare or not lets(name, "free", f"So. {text}", are_tokens=are_tokens), text


@pytest.mark.parametrize("name", ["hermes", "glm45", "qwen3_coder", "nemotron_json", "olmo3", "granite-20b-fc"])
def test_marks_that_are_tokens_and_not_special_can_be_forced(name: str) -> None:
    """As in the files of Qwen 3 and GLM: llguidance takes each added token in angle brackets for special."""
    backend = Tokenizer.from_str(byte_tokenizer_json("<end>"))
    backend.add_tokens([AddedToken(mark, special=False) for mark in sorted(TOOL_FORMATS[name].markup)])
    config = TokenizerConfig(special_tokens={}, eos_token_ids=frozenset({NUM_BYTES}), chat_template=None)
    tokenizer = TextTokenizer(backend, config)
    tools = [OfferedTool("weather", WEATHER, strict=True), OfferedTool("stop", {})]
    grammars = [
        TOOL_FORMATS[name].grammar(tools, tokenizer.grammar_tokens, parallel=True),
        forced_grammar(tools, TOOL_FORMATS[name], tokenizer.grammar_tokens, max_calls=1)[0],
    ]
    for grammar in grammars:
        ids = tokenizer.encode(calls(name, call(name, "weather", **GOOD[1])), add_special_tokens=False)
        made = LLMatcher(LLTokenizer(backend.to_str(), eos_token=NUM_BYTES), grammar, log_level=0)
        made.compute_bitmask()
        assert not made.is_error(), made.get_error()
        assert made.try_consume_tokens(ids) == len(ids)
        assert made.is_accepting()


def test_a_schema_that_a_format_cannot_enforce_is_forced_as_json() -> None:
    tool = OfferedTool("f", {"properties": {"a": {"type": "string", "pattern": "x"}}}, strict=True)
    for name in ("glm45", "qwen3_coder"):
        with pytest.raises(InvalidRequestError, match="pattern"):
            TOOL_FORMATS[name].grammar([tool], {}, parallel=True)
        assert forced_grammar([tool], TOOL_FORMATS[name], {}, max_calls=1)[1] is FORCED
        assert forced_grammar([tool._replace(strict=False)], TOOL_FORMATS[name], {}, max_calls=1)[1] is FORCED
        loose = OfferedTool("f", {"properties": {"a": {"type": "string"}}, "additionalProperties": True})
        assert forced_grammar([loose], TOOL_FORMATS[name], {}, max_calls=1)[1] is FORCED
    keyword = OfferedTool("f", {"properties": {"a b": {}}})
    assert forced_grammar([keyword], TOOL_FORMATS["pythonic"], {}, max_calls=1)[1] is FORCED
    assert forced_grammar([keyword], TOOL_FORMATS["harmony"], {}, max_calls=1)[1] is FORCED  # the marks are no tokens
    assert forced_grammar([keyword], None, {}, max_calls=1)[1] is FORCED


def test_many_tools_with_long_descriptions_can_be_forced() -> None:
    """Descriptions are no part of a grammar. If it is too long in the model's format, it is one of a JSON list."""
    description = {"description": "A long text. " * 50}
    properties = {f"p{index}": {"type": "integer", **description} for index in range(8)}
    for num_tools, is_own in ((40, True), (75, False)):
        tools = [OfferedTool(f"tool_{index}", {"properties": properties, **description}) for index in range(num_tools)]
        grammar, tool_format = forced_grammar(tools, TOOL_FORMATS["glm45"], {}, max_calls=1)
        assert tool_format is (TOOL_FORMATS["glm45"] if is_own else FORCED)
        assert len(grammar) <= MAX_TEXT
    whole = {"type": "object", "title": "x", "properties": {"title": {"title": "x", "enum": [{"title": 1}]}}}
    whole |= {"anyOf": [{"description": "x"}], "items": {"title": "x"}, "$defs": {"description": {"type": "string"}}}
    assert drop_annotations(whole) == {
        "type": "object", "properties": {"title": {"enum": [{"title": 1}]}},
        "anyOf": [{}], "items": {}, "$defs": {"description": {"type": "string"}},
    }  # fmt: skip


def test_a_parameter_that_refers_to_another_place_is_forced_as_json() -> None:
    parameters = {"properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"$ref": "#/properties/a"}}}}
    for name in ("glm45", "qwen3_coder", "pythonic"):
        assert forced_grammar([OfferedTool("f", parameters)], TOOL_FORMATS[name], {}, max_calls=1)[1] is FORCED


def test_an_answer_may_stand_instead_of_forced_calls() -> None:
    answer = GrammarSpec.of_json_schema({"type": "object", "required": ["done"]})
    tools = [OfferedTool("stop", {})]
    for name in NAMES:
        grammar, tool_format = forced_grammar(
            tools, TOOL_FORMATS[name], special_tokens(name, are_tokens=True), max_calls=1, answer=answer
        )
        assert tool_format is (FORCED if name == "harmony" else TOOL_FORMATS[name])
        vocabulary = ByteVocabulary(special_tokens(name, are_tokens=True))
        tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=[vocabulary.eos_token_id])
        for text, is_fine in (('{"done":1}', True), ("words", False)):
            ids = vocabulary(text.encode())
            assert (LLMatcher(tokenizer, grammar, log_level=0).try_consume_tokens(ids) == len(ids)) is is_fine


@pytest.mark.parametrize("name", NAMES)
def test_schemas_of_any_kind_make_a_grammar(name: str) -> None:
    """Whatever a client sends as a schema, calls can be forced."""
    for parameters in (
        {"properties": []},
        {"required": "city"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"x": {}}}}},
        {"properties": {"a": True, "b": {"type": ["string", "integer"]}, "c": {"anyOf": [{"type": "null"}]}}},
        {"properties": {"a": {"$ref": "#/nowhere"}, "b": {"type": "string", "format": "date"}}},
    ):
        special = special_tokens(name, are_tokens=True)
        grammar, _ = forced_grammar([OfferedTool("f", parameters)], TOOL_FORMATS[name], special, max_calls=2)
        vocabulary = ByteVocabulary(special)
        tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=[vocabulary.eos_token_id])
        made = LLMatcher(tokenizer, grammar, log_level=0)
        refused = "required" in parameters or "properties" in parameters
        assert refused or not made.is_error(), made.get_error()


def wander(name: str, kind: str, seed: int) -> str | None:
    """Return an answer of random tokens that the grammar allows, or None if it does not end soon."""
    first, vocabulary = matcher(name, kind, are_tokens=True)
    made, chance = first.deep_copy(), random.Random(seed)
    names = {token_id: mark.encode() for mark, token_id in special_tokens(name, are_tokens=True).items()}
    text = b""
    for _ in range(500):
        if made.is_accepting() and (kind != "free" or chance.random() < 0.05):
            return text.decode()
        bits = made.compute_bitmask()
        allowed = [place for place in range(len(vocabulary.tokens)) if bits[place // 8] >> place % 8 & 1]
        allowed = [token for token in allowed if token != vocabulary.eos_token_id]
        if not allowed:
            return text.decode()
        ending = [token for token in allowed if token in names or vocabulary.tokens[token] in _ENDING]
        token = chance.choice(ending if ending and chance.random() < 0.7 else allowed)
        assert made.consume_token(token)
        text += names.get(token, vocabulary.tokens[token])
    return None


_ENDING = {bytes([byte]) for byte in b'"</>aegmnprtv_l\n]})'}


@pytest.mark.parametrize("name", NAMES)
def test_whatever_a_grammar_lets_through_is_read_as_valid_calls(name: str) -> None:
    num_calls = 0
    for kind in ("one", "some", "free"):
        for seed in range(4):
            text = wander(name, kind, seed)
            if text is None:
                continue
            found = read(name, text)
            assert found or kind == "free", text
            num_calls += len(found)
            for function, arguments in found:
                assert isinstance(arguments, dict), text
                if function == "weather":
                    jsonschema.validate(arguments, WEATHER)
    assert num_calls
