"""One call makes a conversation's prompt, parameters, parser and grammar, and a plain one gets nothing it did not ask for."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from engine.core.types import GrammarKey
from engine.text.chat.chat_format import ChatFormat
from engine.text.chat.limits import ModelLimits
from engine.text.chat_template import ChatTemplate
from engine.text.fields.body import checked
from engine.text.fields.chat import ChatFields
from engine.text.grammars.compiler import GrammarCompiler
from engine.text.grammars.thinking import ThinkingGrammar
from engine.text.requests.chat_preprocessor import ChatPreprocessor, PreparedChat
from engine.text.tokenizer import TextTokenizer
from engine.text.types import Content, Reasoning, SamplingDefaults

END = 999
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TOOLS = "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }};{% endfor %}" + PLAIN
THINKS = PLAIN + "{% if enable_thinking %}</think>{% endif %}"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]


class Characters:
    """A tokenizer whose tokens are characters, and the tags of thoughts."""

    vocab_size, max_token_chars, eos_token_ids = 1000, 1, frozenset({END})
    special_tokens = grammar_tokens = {"<end>": END}  # noqa: RUF012 - read only
    sampling_defaults = SamplingDefaults()

    def __init__(self, template: str | None) -> None:
        self.chat_template = None if template is None else ChatTemplate(template, {})

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [997 + (text == "</think>")] if text in ("<think>", "</think>") else list(map(ord, text))


def preprocessor(template: str | None = PLAIN, **fields: Any) -> ChatPreprocessor:
    tokenizer: Any = Characters(template)
    made: TextTokenizer = tokenizer
    values: dict[str, Any] = {"vocab_size": 1000, "max_model_len": 900, "pool_tokens": 1000, "max_logprobs": 5}
    chat_format = ChatFormat.of(made, **fields)
    return ChatPreprocessor(ModelLimits(**values, has_priorities=False, tokenizer=made, chat_format=chat_format))


def prepared(template: str | None = PLAIN, settings: dict[str, Any] | None = None, **fields: Any) -> PreparedChat:
    body = checked(ChatFields, {"messages": [{"role": "user", "content": "hi"}], **fields})
    return preprocessor(template, **(settings or {})).prepare(body)


def test_a_plain_conversation_gets_a_prompt_and_parameters_alone() -> None:
    chat = prepared(temperature=0.5)
    assert chat.text == "[user]hi"
    assert chat.prompt == list(map(ord, chat.text))
    assert (chat.params.temperature, chat.params.max_tokens) == (0.5, 900 - len(chat.prompt))
    assert (chat.constraint, chat.params.grammar, chat.rules.make_parser) == (None, None, None)


def test_a_length_holds_where_a_request_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Characters, "sampling_defaults", SamplingDefaults(max_tokens=5))
    assert [prepared(max_tokens=asked).params.max_tokens for asked in (None, 3, 9)] == [5, 3, 9]
    monkeypatch.setattr(Characters, "sampling_defaults", SamplingDefaults(max_tokens=5, max_new_tokens=4))
    assert [prepared(max_tokens=asked).params.max_tokens for asked in (None, 3, 9)] == [4, 3, 4]


def test_a_prompt_that_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        prepared(None)
    with pytest.raises(ContextLengthError):
        prepared(messages=[{"role": "user", "content": "x" * 1000}])


def test_a_template_without_tools_gets_them_in_words() -> None:
    chat = prepared(tools=[WEATHER])
    assert "weather" in chat.text
    assert chat.text.endswith("[user]hi")
    assert chat.rules.make_parser is not None
    assert chat.constraint is None
    assert "weather" not in prepared(tools=[WEATHER], tool_choice="none").text


def test_calls_that_must_be_made_and_strict_ones_have_a_grammar() -> None:
    assert prepared(TOOLS, tools=[WEATHER]).constraint is None
    for fields in ({"tools": [WEATHER], "tool_choice": "required"}, {"tools": [STRICT]}):
        constraint = prepared(TOOLS, **fields).constraint
        assert constraint is not None
        assert constraint.param == "tools"
        assert "weather" in constraint.spec.text
    with pytest.raises(InvalidRequestError, match="guided_regex leaves no room") as caught:
        prepared(TOOLS, tools=[WEATHER], tool_choice="required", guided_regex="a", response_format={"type": "text"})
    assert caught.value.param == "guided_regex"


def test_the_answer_of_a_conversation_without_calls_keeps_its_constraint() -> None:
    constraint = prepared(response_format={"type": "json_object"}).constraint
    assert constraint is not None
    assert constraint.param == "response_format"
    assert prepared(response_format={"type": "json_object"}, max_tokens=0).constraint is None


def test_calls_in_an_unknown_format_are_refused() -> None:
    template = "{{ tools }}" + PLAIN
    with pytest.raises(UnsupportedError, match="--tool-call-parser"):
        prepared(template, tools=[WEATHER])
    assert prepared(template, {"tool_call_parser": "none"}, tools=[WEATHER]).rules.make_parser is None


def test_thoughts_are_bounded_and_come_before_a_grammar() -> None:
    chat = prepared(THINKS)
    assert chat.rules.make_parser is not None
    assert chat.params.grammar is None  # neither a budget nor a grammar
    bounded = prepared(THINKS, thinking_token_budget=3)
    key = bounded.params.grammar
    assert isinstance(key, GrammarKey)
    assert key.thinking is not None
    assert isinstance(GrammarCompiler().hold(key), ThinkingGrammar)
    assert key.end_ids == {END}


OPENED = PLAIN + "[THINK]{{ '' if true else '[/THINK]' }}"  # whose tags are no tokens here


@pytest.mark.parametrize(
    ("fields", "has_thoughts"),
    [
        ({}, True),
        ({"structured_outputs": {"regex": "[a-z]+"}}, False),
        ({"structured_outputs": {"regex": r"[a-z]*\[/THINK][a-z]+"}}, True),
        ({"structured_outputs": {"grammar": 'start: /[a-z]*/ "[/THINK]" /[a-z]+/'}}, True),
        ({"tools": [STRICT]}, True),
        ({"tools": [STRICT], "tool_choice": "required"}, False),
    ],
)
def test_a_grammar_without_thoughts_makes_an_answer_of_its_text(fields: dict[str, Any], has_thoughts: bool) -> None:
    make_parser = prepared(OPENED, **fields).rules.make_parser
    assert make_parser is not None
    parser = make_parser()
    assert [type(piece) for piece in [*parser.push("a"), *parser.finish()]] == [Reasoning if has_thoughts else Content]


OPENS = PLAIN + "{% if add_generation_prompt %}[bot]{{ '<t>' if enable_thinking else '' }}{% endif %}"


def test_the_next_turn_has_what_comes_before_the_opening_of_an_answer() -> None:
    chat = prepared(OPENS, chat_template_kwargs={"enable_thinking": True})
    assert chat.text == "[user]hi[bot]<t>"
    assert chat.turn_end == len("[user]hi")
    assert prepared(OPENS).turn_end == len("[user]hi")
    assert prepared(OPENS, add_generation_prompt=False).turn_end == 0
    assert prepared(PLAIN).turn_end == 0, "nothing opens the answer"
    refuses = OPENS + "{% if messages | length < 2 %}{{ raise_exception('too short') }}{% endif %}"
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "oh"}]
    assert prepared(refuses, messages=turns).turn_end == 0
