"""Answers in channels: thoughts, words and calls told apart in any pieces, and constrained where a tool is strict."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from engine.core.errors import InvalidRequestError
from engine.text.channels import ENDS, MARKS, ChannelParser
from engine.text.tools.formats import TOOL_FORMATS
from engine.text.tools.tool_format import OfferedTool
from engine.text.types import CallArguments, CallBegin, Content, Reasoning
from tests.pure.byte_vocabulary import ByteVocabulary
from tests.pure.calls import check_in_pieces

ROME = '{"city": "Rome"}'
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ROME}"
FINAL = "<|channel|>final<|message|>"


def parse(*texts: str, reads_calls: bool = True) -> list[Any]:
    """Words as strings, thoughts after a "~", calls as [name, arguments]."""
    splitter = ChannelParser(reads_calls=reads_calls)
    merged: list[Any] = []
    last: type[Any] | None = None  # of whose kind the last of them is
    for piece in [*(piece for text in texts for piece in splitter.push(text)), *splitter.finish()]:
        if isinstance(piece, CallBegin):
            merged.append([piece.name, ""])
            last = CallBegin
            continue
        assert piece.text
        if isinstance(piece, CallArguments):
            merged[-1][1] += piece.text
        elif type(piece) is last:
            merged[-1] += piece.text
        else:
            last = type(piece)
            merged.append(("~" if isinstance(piece, Reasoning) else "") + piece.text)
    return merged


GOOD = [
    (f"{THOUGHT}{FINAL}Hello <b>, 1 < 2 <|", ["~Hm.", "Hello <b>, 1 < 2 <|"]),
    (f"{THOUGHT}{FINAL}Hello<|return|>", ["~Hm.", "Hello"]),
    (f"{THOUGHT}{CALL}", ["~Hm.", ["weather", ROME]]),
    (f"{THOUGHT}{CALL}<|call|>", ["~Hm.", ["weather", ROME]]),
    (f"{CALL}<|call|><|start|>assistant{CALL}", [["weather", ROME]] * 2),
    (f" to=functions.weather<|channel|>commentary json<|message|>{ROME}", [["weather", ROME]]),
    (f"{THOUGHT} to=functions.weather<|channel|>commentary<|message|>{ROME}", ["~Hm.", ["weather", ROME]]),
    ("<|channel|>commentary to=functions.stop<|message|>", [["stop", "{}"]]),
    ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CALL, ["I look.", ["weather", ROME]]),
    (f"{THOUGHT}<|channel|>analysis<|message|>So.<|end|>", ["~Hm.\nSo."]),
    ("<|channel|>analysis to=python<|message|>1+1<|call|>", ["~1+1"]),  # a tool that the model was trained with
    ("<|channel|>commentary to=browser.open<|message|>x<|call|>", ["~x"]),
    ("<|channel|>commentary to=functions.python<|message|>{}<|call|>", [["python", "{}"]]),
    ("<|channel|>commentary to=weather json<|message|>{}<|call|>", [["weather", "{}"]]),
    (f"{THOUGHT}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{FINAL}Done.", ["~Hm.", "I look.\nDone."]),
    (f"{FINAL[:-11]} <|constrain|>json<|message|>{ROME}<|return|>", [ROME]),
    (f"<|start|>assistant{FINAL}a", ["a"]),
    ("<|channel|>analysis<|message|>cut sho", ["~cut sho"]),
    ("<|channel|>anal", []),
    (f"{CALL[:-3]}", [["weather", ROME[:-3]]]),
    ("just words <|x", ["just words <|x"]),
    (" to whom", [" to whom"]),
    ('{"a": 1}', ['{"a": 1}']),  # under a grammar
    (f"{FINAL}a<|end|> and more", ["aand more"]),
    ("<|channel|>" + "x" * 600, ["<|channel|>" + "x" * 600]),
    (f"<|channel|>{'x' * 600}<|end|>{CALL}", [f"<|channel|>{'x' * 600}", ["weather", ROME]]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), GOOD)
def test_in_any_two_pieces_and_letter_by_letter(text: str, expected: list[Any]) -> None:
    check_in_pieces(parse, text, expected)


def test_a_tool_of_the_client_may_have_any_name() -> None:
    parser = ChannelParser(reads_calls=True, tools=["python"])
    assert parser.push("<|channel|>commentary to=python<|message|>{}") == [CallBegin("python"), CallArguments("{}")]


def test_calls_that_nobody_reads_are_thoughts() -> None:
    assert parse(f"{THOUGHT}{CALL}<|call|>", reads_calls=False) == [f"~Hm.\n{ROME}"]


def test_what_comes_next_is_told() -> None:
    splitter = ChannelParser(reads_calls=True)
    assert not splitter.is_reasoning
    assert splitter.push("<|channel|>analysis<|message|>a") == [Reasoning("a")]
    assert splitter.is_reasoning
    assert splitter.push("<|end|><|start|>assistant<|channel|>final<|message|>b") == [Content("b")]
    assert not splitter.is_reasoning


WORDS = [
    *MARKS,
    "assistant",
    "analysis",
    "commentary",
    "final",
    " to=functions.weather",
    "json",
    ROME,
    "<",
    "|",
    " ",
    "\n",
    "é",
]
# A header may be too long, by any part of a mark.
LONG = st.integers(470, 520).map("x".__mul__)
texts = st.lists(st.sampled_from(WORDS) | LONG | st.text(max_size=3), max_size=16).map("".join)


@given(texts, st.data())
def test_any_pieces_give_the_same(text: str, data: Any) -> None:
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8))), len(text)]
    assert parse(*(text[i:j] for i, j in itertools.pairwise(edges))) == parse(text)


# -- where tools are strict --------------------------------------------------------------------------------------------

SPECIAL = {mark: 10 + place for place, mark in enumerate(MARKS)}
VOCABULARY = ByteVocabulary(SPECIAL)
TOKENIZER = LLTokenizer(TokenizerWrapper(VOCABULARY), eos_token=[VOCABULARY.eos_token_id])
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOLS = [OfferedTool("weather", CITY, strict=True), OfferedTool("weather_note", {})]
FIRST = LLMatcher(TOKENIZER, TOOL_FORMATS["harmony"].grammar(TOOLS, SPECIAL, parallel=True), log_level=0)


def lets(text: str) -> bool:
    parts = re.split("(" + "|".join(map(re.escape, MARKS)) + ")", text)
    ids = [token for part in parts for token in ([SPECIAL[part]] if part in SPECIAL else VOCABULARY(part.encode()))]
    matcher = FIRST.deep_copy()
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_what_is_said_is_free_and_what_is_sent_is_valid() -> None:
    head = CALL.removesuffix(ROME)
    for text in (f"{THOUGHT}{FINAL}Hello {{}}", f"{THOUGHT}{CALL}", CALL, f"{THOUGHT}{head}{{ }}".replace("weather", "weather_note"),
                 f" to=functions.weather<|channel|>commentary json<|message|>{ROME}", f"{THOUGHT}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}"):  # fmt: skip
        assert lets(text), text
    for text in (f'{THOUGHT}{head}{{"city": "Paris"}}', f'{head}{{"city": "Rome", "a": 1}}', CALL.replace("weather", "nobody"),
                 CALL.replace("functions.", "")):  # fmt: skip
        assert not lets(text), text
    [[_, arguments]] = parse(CALL)
    jsonschema.validate(json.loads(arguments), CITY)
    assert "<|end|>" in ENDS
    with pytest.raises(InvalidRequestError, match="no tokens"):
        TOOL_FORMATS["harmony"].grammar(TOOLS, {}, parallel=True)
