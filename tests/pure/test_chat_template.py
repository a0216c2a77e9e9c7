"""Chat templates: what they write is jinja's, and what takes long is rendered in a process with limits."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.core.errors import ConfigError, InvalidRequestError, OverloadedError
from engine.text import chat_template
from engine.text.chat_template import MAX_INPUT, MAX_SOURCE, ChatTemplate
from engine.text.template_environment import _to_json

MESSAGES = [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "x"}]
LONG = {  # whatever the loop, each turn checks the clock
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a loop that passes over all": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "a loop that goes on": "{% for a in range(99999) %}{% for b in range(99999) %}{% continue %}{% endfor %}{% endfor %}",
    "a loop in a macro": "{% macro m() %}{% for a in range(99999) %}{{ m() }}{% endfor %}{% endmacro %}{% for a in range(99999) %}{% for b in range(99999) %}{% set x = m %}{% endfor %}{% endfor %}",
    "its own text": "{% for a in range(99999) %}" + "long text " * 2000 + "{% endfor %}",
}


PLAIN = """{%- if messages[0].role == 'system' -%}{%- set system = messages[0].content | trim -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set system, rest = '', messages -%}{%- endif -%}
{%- set ns = namespace(last=rest | length - 1, found=false, name='') -%}
{%- for message in rest[::-1] -%}
  {%- if message.role == 'user' and not ns.found and message.content is string -%}
    {%- set ns.found = true -%}{%- set ns.last = (rest | length - 1) - loop.index0 -%}{%- set ns.name = message.role -%}
  {%- endif -%}
{%- endfor -%}
{{ bos_token }}{{ ns.name }}{{ ns.last - 2 }}
{%- for message in rest if message.role != 'system' -%}
  {%- set content = message.content if message.content is string else '' -%}
  {%- if '</think>' in content -%}
    {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
  {%- endif -%}
  {%- set plain = content.replace('\\n', ' ') + '.' -%}
  {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) and loop.index0 > 1000 -%}{{ raise_exception('alternate') }}{%- endif -%}
  {{ '<|' + message.role + '|>' ~ plain ~ content | trim + '<|end|>' }}
  {%- for call in message.tool_calls or [] -%}
    {{ call.name }}{{ call.arguments | tojson }}{% for key, value in call.arguments.items() %}{{ key }}={{ value }}{% endfor %}
    {{- ', ' if not loop.last }}
  {%- endfor -%}
  {%- if message.skipped is defined -%}{%- continue -%}{%- endif -%}
{%- else -%}nothing{%- endfor -%}
{{ messages | map(attribute='role') | join(', ') }}{{ tools | tojson(indent=2) if tools is not none }}{{ system }}{{ messages[0].role | upper }}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

USUAL = """{%- set ns = namespace(found=false, parts=[]) -%}
{%- macro show(value, depth=0) -%}
  {%- if value is mapping -%}{ {%- for key, inner in value | dictsort -%}{{ key }}:{{ show(inner, depth + 1) }}
  {%- if not loop.last %}, {% endif -%}{%- endfor -%} }
  {%- elif value is iterable and value is not string -%}[{{ value | map('string') | join(', ') }}]
  {%- else -%}{{ value | tojson(indent=2) }}{%- endif -%}
{%- endmacro -%}
{%- for message in messages if message.role != 'system' -%}
  {%- if loop.first %}{% set ns.found = true %}{% endif -%}
  {{ '<|' ~ message['role'] ~ '|>' + message.content.strip().replace('\\n', ' ') | trim }}
  {%- set ns.parts = ns.parts + [message.content | length, loop.index0] -%}
  {{ loop.cycle('odd', 'even') }}{{ '%s-%03d' % (message.role, loop.index) }}{{ '{:>4}'.format(loop.length) }}
  {%- if message.content.split('t') | length > 9 -%}{%- continue -%}{%- endif -%}
{%- else -%}nothing{%- endfor -%}
{{ messages[::-1] | map(attribute='role') | unique | list }}{{ ns.parts | sum }}{{ (ns.parts | sort | last | default(1)) * 2 ** 3 }}
{{ show({'b': [1, 2], 'a': {'c': none}}) }}{{ [1, [2, 3]] | tojson }}{{ {'x': (1, 2)} }}{{ messages | selectattr('role', 'equalto', 'user') | list | count }}
{%- set shown %}{{ messages[0].content | upper | indent(2) }}{% endset %}{{ shown | center(30) }}{{ undefined_thing }}
{%- for row in range(10) | batch(3, '-') %}{{ row | join('') }}{% endfor %}{{ 'a,b'.split(',') | last }}{{ 7 % 4 }}{{ ', '.join(['p', 'q']) }}"""


def made(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>"})


HOW: dict[str, Any] = {"add_generation_prompt": True, "continue_final_message": False, "template_kwargs": {}}


def render(template: ChatTemplate, messages: list[dict[str, Any]] = MESSAGES) -> str:
    return template.render(messages, **HOW)


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing with a loop is rendered here."""
    monkeypatch.setattr(chat_template, "_HERE_S", -1.0)


@pytest.mark.parametrize("name", list(LONG))
def test_what_takes_long_is_not_rendered_here(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChatTemplate, "_wants_parts", False)  # which the process would look for, each time for a second
    assert not isinstance(made(LONG[name]).begin(MESSAGES, **HOW), str)


@pytest.mark.parametrize("source", ["", "plain", PLAIN, USUAL, "{% for m in messages %}{{ m.content }}{% endfor %}"])
def test_what_is_short_is_rendered_here(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_HERE_S", 100.0)
    template = made(source)
    assert isinstance(template.begin(MESSAGES, **HOW), str)
    assert template._child.pid is None


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ ('a' * 10000000) | sort | length }}",
        "{{ 'a' * 10000000000 }}",
        "{{ 'a' * 30000000 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
@pytest.mark.usefixtures("beside")
def test_each_kind_ends_with_one_sentence_and_the_next_is_rendered(source: str) -> None:
    """Time, time in one call of C, memory, a long prompt, recursion, all in the process."""
    template = made("{% for m in messages[:1] %}{% if m.content == 'go' %}" + source + "{% endif %}{% endfor %}fine")
    try:
        with pytest.raises(InvalidRequestError, match="chat template") as caught:
            render(template, [{"role": "user", "content": "go"}])
        assert caught.value.param == "messages"
        assert render(template) == "fine"
    finally:
        template.close()


def test_a_macro_that_calls_itself_is_refused_here() -> None:
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        render(made("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"))


@pytest.mark.usefixtures("beside")
def test_a_process_that_was_killed_is_not_the_requests_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    template = made("{% for i in range(3) %}{{ i }}{% endfor %}")
    assert render(template) == "012"
    ask = template._child.ask

    def killed(question: list[bytearray]) -> list[bytearray]:
        assert template._child.pid is not None
        os.kill(template._child.pid, signal.SIGSTOP)  # so that the answer cannot come first
        os.kill(template._child.pid, signal.SIGKILL)
        return ask(question)

    monkeypatch.setattr(chat_template, "_RETRY_S", 3.0)
    process = template._child._process
    assert process is not None
    monkeypatch.setattr(process, "poll", lambda: None)
    monkeypatch.setattr(template._child, "ask", killed)
    with pytest.raises(OverloadedError):
        render(template)
    monkeypatch.undo()
    assert render(template) == "012"
    template.close()


@pytest.mark.parametrize(("limit", "value"), [("_HERE_S", -1.0), ("_HERE_CHARS", 3)])
def test_a_bounded_template_that_takes_long_is_given_up(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: float
) -> None:
    template = made(PLAIN)
    text = render(template)
    monkeypatch.setattr(chat_template, limit, value)
    begun = template.begin(MESSAGES, **HOW)
    assert not isinstance(begun, str)
    assert begun() == text
    template.close()


def test_every_loop_checks_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_HERE_S", -1.0)
    for loop in ("for m in messages", "for m in messages if false", "for a, b in messages[0].items()"):
        template = made("{% " + loop + " %}{% endfor %}")
        assert not isinstance(template.begin(MESSAGES, **HOW), str)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x" * (MAX_SOURCE + 1), "characters"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deeply"),
        ("{% if 1 %}" * 5000 + "{% endif %}" * 5000, "nested too deeply"),
        ("{% for i in [] %}" * 30 + "{% endfor %}" * 30, "nested blocks"),
        ("{{ " + "9" * 5000 + " }}", "limit"),
        ("{{ " + "-" * 50_000 + "1 }}", "nested too deeply"),
        ("{% for %}", "cannot be read"),
    ],
)
def test_what_cannot_be_compiled_is_said_at_start(source: str, words: str) -> None:
    with pytest.raises(ConfigError, match="--chat-template") as caught:
        ChatTemplate(source, {})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


CONVERSATIONS = {
    "short": MESSAGES,
    "one": MESSAGES[:1],
    "system": [{"role": "system", "content": " s\nt "}, *MESSAGES * 20],
    "odd": [
        {"role": "user", "content": "half \ud800 of a pair, \0 and ünïcode 🦜"},
        {
            "role": "assistant",
            "content": "a</think>\nb\nc",
            "tool_calls": [{"name": "f", "arguments": {"x": [1, None, 2.5]}}],
        },
    ],
    "long": [{"role": "user", "content": "word " * 200}] * 1000,
}


@pytest.mark.parametrize("source", [PLAIN, USUAL], ids=["plain", "usual"])
@pytest.mark.parametrize("name", list(CONVERSATIONS))
def test_what_templates_do_is_what_jinja_does(name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    messages = CONVERSATIONS[name]
    variables = {
        "messages": messages,
        "tools": None,
        "documents": None,
        "bos_token": "<s>",
        "add_generation_prompt": True,
    }
    monkeypatch.setattr(chat_template, "_HERE_S", 100.0)
    template = made(source)
    assert render(template, messages) == environment.from_string(source).render(variables)
    assert (template._child.pid is None) == (name != "long")
    template.close()


def test_a_megabyte_of_text_is_rendered() -> None:
    text = "The party of the first part. " * 40_000
    template = made(PLAIN)
    rendered = render(template, [{"role": "user", "content": text}])
    assert len(rendered) > len(text) > 30 * MAX_INPUT
    template.close()


def test_a_continued_message_may_be_rendered_by_the_process() -> None:
    for source in (
        "{% for m in messages %}{{ m.content }}!{% endfor %}",
        "{{ messages | map(attribute='content') | sort | join }}!",
    ):
        template = made(source)
        options: dict[str, Any] = {**HOW, "add_generation_prompt": False, "continue_final_message": True}
        assert template.render([{"role": "user", "content": "a"}], **options) == "a"
        with pytest.raises(InvalidRequestError, match="leaves out the last message"):
            made("{{ range(2) | list }}").render(MESSAGES, **options)
        template.close()


@pytest.mark.parametrize("value", [object(), {("a", "b"): 1}], ids=["an object", "a key"])
def test_values_that_are_no_json_are_refused(value: object) -> None:
    with pytest.raises(InvalidRequestError, match="JSON"):
        made("{{ x }}").render(MESSAGES, **{**HOW, "template_kwargs": {"x": value}})


def test_a_refusal_is_the_templates_sentence_wherever_it_is_rendered() -> None:
    for source in ("{{ raise_exception('no tools') }}", "{{ [1] | sort }}{{ raise_exception('no tools') }}"):
        template = made(source)
        with pytest.raises(InvalidRequestError, match="refuses these messages: no tools"):
            render(template)
        template.close()


PARTS = "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p.text if p.type == 'text' else '<image>' }}{% endfor %};{% endfor %}"


def test_texts_become_parts_where_a_template_shows_nothing_else() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "image"}]}
    assert render(made(PARTS), [{"role": "user", "content": "a"}, parts]) == "user:a;user:b<image>;"
    either = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}{% endfor %}"
    assert render(made(either), [{"role": "user", "content": "a"}, parts]) == "ab"
    options: dict[str, Any] = {**HOW, "add_generation_prompt": False, "continue_final_message": True}
    assert made(PARTS).render([{"role": "assistant", "content": "a"}], **options) == "assistant:a"
    calls = {"role": "assistant", "content": None, "tool_calls": []}
    assert render(made(PARTS), [calls]) == "assistant:;"
