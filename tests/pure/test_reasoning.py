"""Thoughts and answer told apart, whatever the pieces; a text that does not begin with thoughts has none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.reasoning import REASONING_TAGS, ReasoningParser, detect_reasoning
from engine.text.types import Content, Reasoning

TAGS = REASONING_TAGS["qwen3"]


def split(*texts: str, within: bool = False) -> tuple[str, str]:
    splitter = ReasoningParser(TAGS, begins_within=within)
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
    assert split(*text, within=within) == expected
    for cut in range(len(text) + 1):
        assert split(text[:cut], text[cut:], within=within) == expected


parts = st.sampled_from(["<think>", "</think>", "<", "/", "think>", " ", "\n", "a"])


@given(st.lists(parts, max_size=12), st.booleans(), st.integers(0, 60))
def test_any_pieces_give_the_same_and_only_tags_and_space_are_lost(words: list[str], within: bool, cut: int) -> None:
    text = "".join(words)
    whole = split(text, within=within)
    assert split(text[:cut], text[cut:], within=within) == split(*text, within=within) == whole
    kept = "".join(whole).split()
    lost = len("".join(text.split())) - len("".join(kept))
    assert lost in (0, 7, 8, 15)  # no tag, an opening, a closing, or one of each


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
    assert detect_reasoning("{{ messages }}") is None
