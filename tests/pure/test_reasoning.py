"""Thoughts and answer told apart, whatever the pieces; a text that does not begin with thoughts has none."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.reasoning import REASONING_TAGS, ReasoningParser, ReasoningTags, detect_reasoning
from engine.text.types import Content, Reasoning
from tests.pure.calls import check_in_pieces

TAGS = REASONING_TAGS["qwen3"]


def split(
    *texts: str, within: bool = False, tags: ReasoningTags = TAGS, enders: tuple[str, ...] = ()
) -> tuple[str, str]:
    splitter = ReasoningParser(tags, begins_within=within, enders=enders)
    pieces = [piece for text in texts for piece in splitter.push(text)] + splitter.finish()
    assert all(piece.text for piece in pieces if isinstance(piece, Content | Reasoning))
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    return thoughts, "".join(piece.text for piece in pieces if isinstance(piece, Content))


CASES = [
    ("<think>\nHm.\n</think>\n\nYes.", False, ("Hm.", "Yes.")),
    ("\n<think>Hm.</think>Yes. ", False, ("Hm.", "Yes. ")),
    ("Hm, so.\n</think>\n\nYes.", True, ("Hm, so.", "Yes.")),
    ("<think>\nHm.</think>Yes.", True, ("Hm.", "Yes.")),  # the tag once more, though the prompt had it
    ("<think>\n\n</think>\n\nYes.", False, ("", "Yes.")),
    ("</think>Yes.", True, ("", "Yes.")),
    ("Hm, <think>is a tag</think>", False, ("", "Hm, <think>is a tag</think>")),
    ("<think>a</think>b<think>c</think>", False, ("a", "b<think>c</think>")),
    ("<think>cut off </th", False, ("cut off </th", "")),
    ("<think>cut off \n", False, ("cut off", "")),
    ("<thin", False, ("", "<thin")),
    ("  <", False, ("", "  <")),
    (" plain ", False, ("", " plain ")),
    ("", True, ("", "")),
]


@pytest.mark.parametrize(("text", "within", "expected"), CASES)
def test_split_in_any_two_pieces_and_letter_by_letter(text: str, within: bool, expected: tuple[str, str]) -> None:
    check_in_pieces(partial(split, within=within), text, expected)


LABELLED = [
    ("<|channel>thought\nHm.\n<channel|>Yes.", ("Hm.", "Yes.")),
    ("<|channel>thoughts<channel|>Yes.", ("s", "Yes.")),
    ("<|channel>Hm.<channel|>", ("Hm.", "")),
    ("<|channel>thou", ("thou", "")),
    ("Yes.", ("", "Yes.")),
]


@pytest.mark.parametrize(("text", "expected"), LABELLED)
def test_a_word_behind_the_tag_is_no_thought(text: str, expected: tuple[str, str]) -> None:
    check_in_pieces(partial(split, tags=REASONING_TAGS["gemma4"]), text, expected)


parts = st.sampled_from(["<think>", "</think>", "<", "/", "think>", " ", "\n", "a"])


@given(st.lists(parts, max_size=12), st.booleans(), st.integers(0, 60))
def test_any_pieces_give_the_same_and_only_tags_and_space_are_lost(words: list[str], within: bool, cut: int) -> None:
    text = "".join(words)
    whole = split(text, within=within)
    assert split(text[:cut], text[cut:], within=within) == split(*text, within=within) == whole
    kept = "".join(whole).split()
    lost = len("".join(text.split())) - len("".join(kept))
    assert lost in (0, 7, 8, 15)  # no tag, an opening, a closing, or one of each


GRANITE = [
    ("Here is my thought process: Hm.\nHere is my response: Yes.", ("Hm.", "Yes.")),
    (" Here's my thought process:\n\nHm.\n\nHere's my response:\n\nYes.", ("Hm.", "Yes.")),
    ("Here is my thought process:\nHm.\nHere's my response:\nYes.", ("Hm.", "Yes.")),
    (
        "<think>Hm, Here is my response: no.</think><response>Yes.\n</response>",
        ("Hm, Here is my response: no.", "Yes."),
    ),
    ("<think>Hm.</think>\n <response>\nYes </res", ("Hm.", "Yes </res")),
    ("<think>Hm.</think>\nYes. </response>", ("Hm.", "Yes. </response>")),
    ("<think>Hm.</think>\n <respo", ("Hm.", "<respo")),
    ("<think>Hm.</think><response>Yes.</response> Bye.", ("Hm.", "Yes. Bye.")),
    ("Here is my answer.", ("", "Here is my answer.")),
    ("Here is my thou", ("", "Here is my thou")),
    ("So. Here is my thought process: no", ("", "So. Here is my thought process: no")),
    ("Here is my thought process: Hm. Here is my res", ("Hm. Here is my res", "")),
]


@pytest.mark.parametrize(("text", "expected"), GRANITE)
def test_thoughts_in_words_or_beside_a_tagged_answer(text: str, expected: tuple[str, str]) -> None:
    tags = REASONING_TAGS["granite"]
    check_in_pieces(partial(split, tags=tags), text, expected)


@pytest.mark.parametrize("begin", ["<think>Hm. ", "<think>Hm.</think>", ""])
def test_a_mark_of_calls_ends_thoughts(begin: str) -> None:
    text = f"{begin}<tool_call>x</think>"
    expected = ("Hm." if begin else "", "<tool_call>x</think>")
    check_in_pieces(partial(split, enders=("<tool_call>",)), text, expected)


def test_what_comes_next_is_known() -> None:
    splitter = ReasoningParser(TAGS, begins_within=False)
    known = [splitter.is_reasoning]
    for text in ("<think>", "a", "</think>", "b"):
        splitter.push(text)
        known.append(splitter.is_reasoning)
    assert known == [False, True, True, False, False]
    assert ReasoningParser(TAGS, begins_within=True).is_reasoning


@pytest.mark.parametrize(
    ("name", "prompt", "continued", "expected"),
    [
        ("qwen3", "user: what is <think>?\nassistant:", "", False),
        ("qwen3", "assistant:\n<think>\n", "", True),
        ("qwen3", "assistant:\n<think>\n\n</think>\n\n", "", False),
        ("qwen3", "assistant:\n<think>\nso far", "<think>\nso far", True),
        ("deepseek_r1", "assistant:", "", True),
        ("deepseek_r1", "assistant:<think>\n\n</think>\n\n", "", False),
        ("deepseek_r1", "assistant:<think>\nHm.</think>so", "<think>\nHm.</think>so", False),
    ],
)
def test_the_prompt_tells_whether_thoughts_have_begun(name: str, prompt: str, continued: str, expected: bool) -> None:
    assert REASONING_TAGS[name].begins_within(prompt, continued) is expected


def test_templates_tell_their_tags() -> None:
    assert detect_reasoning("{% if '</think>' in content %}") is TAGS
    assert detect_reasoning("[THINK] ... [/THINK]") is REASONING_TAGS["mistral"]
    assert detect_reasoning("<|channel>thought\n<channel|>") is REASONING_TAGS["gemma4"]
    assert detect_reasoning("{{ messages }}") is None
    assert detect_reasoning("write 'Here is my response:' before it") is REASONING_TAGS["granite"]
    assert detect_reasoning("<|start_of_role|> <think></think> <response></response>") is REASONING_TAGS["granite"]
    for name in ("deepseek_v3", "glm45", "glm47", "kimi_k2", "olmo3"):
        assert REASONING_TAGS[name] is TAGS
