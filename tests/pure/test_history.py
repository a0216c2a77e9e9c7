"""A prompt has the ids in which its answers were generated, and decodes to the same text as ever."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.core.types import FinishReason, TokenEvent
from engine.text.chat import history as history_module
from engine.text.chat.chat_format import ChatFormat
from engine.text.chat.choice import Choice, Delta
from engine.text.chat.history import AnswerHistory, Owner
from engine.text.chat.limits import ModelLimits
from engine.text.fields.body import checked
from engine.text.fields.chat import ChatFields
from engine.text.requests.chat_preprocessor import ChatPreprocessor, PreparedChat
from engine.text.tokenizer import TextTokenizer, TokenizerConfig

TEMPLATE = """{% for tool in tools or [] %}<tool_call>{{ tool.function.name }};{% endfor %}\
{% for m in messages %}<start>{{ m.role }}
{% if m.content %}{{ m.content.split('</think>')[-1] }}{% endif %}\
{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<end>
{% endfor %}{% if add_generation_prompt %}<start>assistant
{% endif %}"""
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
LETTERS = "abcd"


def make_tokenizer() -> TextTokenizer:
    """Bytes, all pairs and triples of four letters, and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in LETTERS for b in LETTERS] + [(a + b, c) for a in LETTERS for b in LETTERS for c in LETTERS]
    words = [*alphabet, *map("".join, pairs)]
    backend = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in ("<start>", "<end>", "<tool_call>")])
    end = backend.token_to_id("<end>")
    assert end is not None
    return TextTokenizer(
        backend, TokenizerConfig(special_tokens={}, eos_token_ids=frozenset({end}), chat_template=TEMPLATE)
    )


TOKENIZER = make_tokenizer()
[END] = TOKENIZER.eos_token_ids


def spelled(text: str) -> list[int]:
    """The ids of a text byte by byte, which the tokenizer would join."""
    return [TOKENIZER.encode(letter, add_special_tokens=False)[0] for letter in text]


class Chats:
    """Conversations with one server; `owner` is who has them."""

    def __init__(self, max_answers: int = 100) -> None:
        self.history = AnswerHistory(TOKENIZER, max_answers, block_size=4)
        chat_format = ChatFormat.of(TOKENIZER)
        values: dict[str, Any] = {"vocab_size": 999, "max_model_len": 999, "pool_tokens": 999, "max_logprobs": 0}
        limits = ModelLimits(**values, has_priorities=False, tokenizer=TOKENIZER, chat_format=chat_format)
        self._preprocessor = ChatPreprocessor(limits, history=self.history)

    def prepare(self, *contents: Any, owner: str = "ann", **fields: Any) -> PreparedChat:
        """Prepare a conversation of the user's and the assistant's turns."""
        messages = [
            {"role": "assistant" if index % 2 else "user", **(turn if isinstance(turn, dict) else {"content": turn})}
            for index, turn in enumerate(contents)
        ]
        body = checked(ChatFields, {"messages": messages, **fields})
        chat = self._preprocessor.prepare(body, owner=Owner(owner))
        assert TOKENIZER.decode(chat.prompt, skip_special_tokens=False) == chat.text
        return chat

    def answer(self, chat: PreparedChat, ids: list[int], *, is_cut: bool = False) -> Delta:
        """Generate an answer, which its length cuts or an end token ends."""
        choice = Choice(TOKENIZER, chat.prompt, chat.rules)
        for token_id in ids:
            choice.accept(TokenEvent("r", 0, (token_id,)))
        end = () if is_cut else (END,)
        choice.accept(TokenEvent("r", 0, end, finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP))
        return choice.take()


@pytest.mark.parametrize("is_cut", [False, True])
def test_an_answer_that_comes_back_has_the_ids_it_was_generated_in(is_cut: bool) -> None:
    chats = Chats()
    first = chats.prepare("ab")
    said = chats.answer(first, spelled("abcd"), is_cut=is_cut).text
    second = chats.prepare("ab", said, "cd")
    assert second.prompt[: len(first.prompt) + 4] == first.prompt + spelled("abcd")
    chats.answer(second, spelled("dddd"))
    third = chats.prepare("ab", said, "cd", "dddd", "b")
    assert third.prompt[: len(second.prompt) + 4] == second.prompt + spelled("dddd")
    assert (chats.history.counts.num_sought, chats.history.counts.num_used) == (3, 3)


@pytest.mark.parametrize("stop", ["c!", "bc!", "!d", "ä", "zz"])
def test_an_answer_that_a_stop_string_cut_has_its_ids_up_to_there(stop: str) -> None:
    """The stop string may begin within a token, here `abc` of `abc!d`, or within a character."""
    chats = Chats()
    first, ids = chats.prepare("ab", stop=[stop]), TOKENIZER.encode("abc!däzz", add_special_tokens=False)
    said = chats.answer(first, [*spelled("abcd"), *ids]).text
    assert said == "abcdabc!däzz".partition(stop)[0]
    later = chats.prepare("ab", said, "cd")
    assert later.prompt[: len(first.prompt) + 4] == first.prompt + spelled("abcd")
    assert chats.history.counts.num_used == 1


def test_an_answer_whose_cut_token_cannot_be_spelled_again_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a tokenizer that changes texts, such as to lower case."""
    chats = Chats()
    first, ids = chats.prepare("ab", stop=["c!"]), TOKENIZER.encode("abc!d", add_special_tokens=False)
    with monkeypatch.context() as patch:
        patch.setattr(chats.history, "_encode", lambda _: spelled("d"))
        said = chats.answer(first, [*spelled("abcd"), *ids]).text
    later = chats.prepare("ab", said, "cd")
    assert said == "abcdab"
    assert chats.history.counts.num_used == 0
    assert chats.answer(later, spelled("dd")).text == "dd"


def test_an_answer_without_text_is_not_part_of_its_prompt() -> None:
    """Of ids that the tokenizer does not have, as a vocabulary that is padded lets a model say."""
    chats = Chats()
    first = chats.prepare("ab")
    chats.answer(first, [990, 991])
    assert chats.prepare("ab").prompt == first.prompt


def test_other_texts_owners_and_places_have_the_tokenizer_s_ids() -> None:
    chats = Chats()
    chats.answer(chats.prepare("ab"), spelled("abcd"))
    chats.answer(chats.prepare("q"), spelled("x</think>abcd"))
    for owner, turns in (
        ("bob", ("ab", "abcd", "c")),
        ("ann", ("ab", "abc", "c")),
        ("ann", ("ac", "abcd", "c")),
        ("ann", ("q", "x</think>abcd", "c")),  # the template leaves out the thoughts
    ):
        chat = chats.prepare(*turns, owner=owner)
        assert chat.prompt == TOKENIZER.encode(chat.text, add_special_tokens=False)
    assert chats.history.counts.num_used == 0
    plain = chats.prepare("ab", "abcd", "c", add_special_tokens=True)
    assert plain.prompt == TOKENIZER.encode(plain.text, add_special_tokens=True)


def test_a_call_whose_arguments_the_client_wrote_again_keeps_its_ids() -> None:
    chats = Chats()
    first = chats.prepare("ab", tools=[TOOL])
    ids = spelled('<tool_call>\n{"name": "f", "arguments": {"abc": 1}}\n</tool_call>')
    [call] = chats.answer(first, ids).calls
    assert call.name == "f"
    again = {"type": "function", "function": {"name": "f", "arguments": '{"abc":1}'}}
    second = chats.prepare("ab", {"content": None, "tool_calls": [again]}, "c", tools=[TOOL])
    assert second.prompt[: len(first.prompt) + len(ids)] == first.prompt + ids


def test_every_choice_is_remembered_and_a_continued_answer_is_one() -> None:
    chats = Chats()
    first = chats.prepare("ab")
    for said in ("abcd", "dcba"):  # n = 2
        chats.answer(first, spelled(said), is_cut=True)
    for said in ("abcd", "dcba"):
        assert chats.prepare("ab", said, "c").prompt[len(first.prompt) :][:4] == spelled(said)
        begun = chats.prepare("ab", said, continue_final_message=True)
        assert begun.prompt == first.prompt + spelled(said)
        chats.answer(begun, spelled("bb"))
        assert chats.prepare("ab", said + "bb", "c").prompt[len(first.prompt) :][:6] == spelled(said + "bb")


def test_of_an_answer_and_its_beginning_the_whole_is_found() -> None:
    """An end token within an answer, as with ignore_eos, is where another one may end."""
    chats = Chats()
    first = chats.prepare("ab")
    whole = [*spelled("ab"), END, *spelled("cd")]
    for ids in (spelled("ab"), whole):
        chats.answer(first, ids)
    assert chats.prepare("ab", "ab<end>cd", "c").prompt[: len(first.prompt) + 5] == first.prompt + whole


def test_memory_is_bounded_and_what_was_used_last_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(chats: Chats) -> list[bool]:
        return [
            chats.prepare(who, "abcd", "c").prompt != chats.prepare(who, "abcd", "c", owner="").prompt for who in "abc"
        ]

    chats = Chats(max_answers=2)
    for who in "aba":
        chats.answer(chats.prepare(who), spelled("abcd"))
        chats.prepare("a", "abcd", "c")
    chats.answer(chats.prepare("c"), spelled("abcd"))
    assert known(chats) == [True, False, True]
    monkeypatch.setattr(history_module, "MAX_IDS", 8)
    chats.answer(chats.prepare("b"), spelled("abcd"))
    assert known(chats) == [False, True, True]


ID = st.integers(0, 255 + 16 + 64)  # any id but special ones


@given(
    turns=st.lists(
        st.tuples(st.text("abcd <é\n", max_size=6), st.lists(ID, min_size=1, max_size=8)), min_size=1, max_size=5
    ),
    drops=st.sets(st.integers(0, 4)),
)
def test_conversations_of_any_ids_grow_by_their_own_prefix(turns: list[tuple[str, list[int]]], drops: set[int]) -> None:
    """Half characters and spaces too; answers that the client sends without their last letter are encoded."""
    chats, contents, prompts = Chats(), list[str](), list[list[int]]()
    for number, (question, ids) in enumerate(turns):
        contents.append(question)
        chat = chats.prepare(*contents)
        prompts.append(chat.prompt)
        said = chats.answer(chat, ids)
        text = said.text
        contents.append(text[:-1] if number in drops else text)
        prompts.append([*chat.prompt, *([] if number in drops or "</think>" in text else ids)])
    for before, after in pairwise(prompts):
        assert after[: len(before)] == before


def test_a_mark_that_changes_the_ids_around_it_divides_nothing() -> None:
    """One that takes the space before it: the ids of the text before depend on it."""
    backend = Tokenizer.from_str(TOKENIZER.for_transformers().backend_tokenizer.to_str())
    backend.add_special_tokens([AddedToken("<eats>", special=True, lstrip=True)])
    ends = frozenset({END, backend.token_to_id("<eats>") or 0})
    config = TokenizerConfig(special_tokens={}, eos_token_ids=ends, chat_template=TEMPLATE)
    history = AnswerHistory(TextTokenizer(backend, config), 10, 4)
    assert history._marks.findall("<eats><end><start>") == ["<end>", "<start>"]
