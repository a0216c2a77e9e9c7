"""Chat templates that loop or grow without end: each ends with one sentence, and what templates do otherwise still works."""

from __future__ import annotations

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.core.errors import ConfigError, InvalidRequestError
from engine.text.chat_template import MAX_SOURCE, ChatTemplate, _to_json

MESSAGES = [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "x"}]
BIG = "{% set s = 'a' * 1000000 %}"
DOUBLED = "{% set x = 'ab' %}" + "{% set x = x ~ x %}" * 60
LISTS = "{% set x = ['a'] %}" + "{% set x = [x, x] %}" * 60

ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a loop that passes over all": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "a loop that goes on": "{% for a in range(99999) %}{% for b in range(99999) %}{% continue %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for a in [range(9)] recursive %}{{ loop([a, a]) }}{% endfor %}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a macro that calls itself twice": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
    "a block that calls itself": "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "callers within callers": (
        "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}" + "{% call m() %}" * 25 + "x" + "{% endcall %}" * 25
    ),
    "filters of filters": "{% for a in range(99999) %}{{ range(99999) | map('string') | list | length }}{% endfor %}",
    "its own text": "{% for a in range(99999) %}" + "long text " * 2000 + "{% endfor %}",
    "text times number": "{{ 'a' * 10**10 }}",
    "number times text": "{{ 10**10 * 'a' }}",
    "list times number": "{{ [1] * 10**10 }}",
    "power": "{{ 9**(9**9) }}",
    "product": "{% set x = 9**9999 %}" + "{% set x = x * x %}" * 60 + "{{ x > 1 }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent with a star": "{{ '%*d' % (10**9, 1) }}",
    "percent of much": BIG + "{{ ('%s' * 1000) % ([s] * 1000) }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "format method": "{{ '{:1000000000}'.format(1) }}",
    "format with a field": "{{ '{:{}}'.format(1, 10**9) }}",
    "percent of one thing often": BIG + "{{ ('%(a)s' * 1000) % {'a': s} }}",
    "format filter of one thing often": BIG + "{{ ('%(a)s' * 1000) | format(a=s) }}",
    "format map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "format of much": BIG + "{{ ('{0}' * 1000).format(s) }}",
    "center filter": "{{ 'a' | center(10**9) }}",
    "center filter of a constant": "{{ 'a' | center(1000000000) }}",
    "center method": "{{ 'a'.center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ 'a'.zfill(width=10**9) }}",
    "to_bytes": "{{ (1).to_bytes(10**9, 'big') }}",
    "expandtabs": "{{ ('\\t' * 100000).expandtabs(100000) }}",
    "replace method": BIG + "{{ s.replace('a', s) }}",
    "replace filter": BIG + "{{ s | replace('a', s) }}",
    "replace nothing": BIG + "{{ s.replace('', s) }}",
    "join method": BIG + "{{ s.join('a' * 1000) }}",
    "join filter": BIG + "{{ range(9999) | join(s) }}",
    "join of much": BIG + "{{ ([s] * 9999) | join }}",
    "translate": BIG + "{{ s.translate({97: s}) }}",
    "indent": "{{ ('\\n' * 100000) | indent(100000) }}",
    "indent by text": BIG + "{{ ('\\n' * 100000) | indent(s, blank=true) }}",
    "tojson": "{{ messages | tojson(indent=10**8) }}",
    "batch": "{{ [1] | batch(10**10, 'a') | list }}",
    "slice": "{{ [1] | slice(10**10) | list }}",
    "round": "{{ 1.5 | round(10**10, 'ceil') }}",
    "sum of lists": "{{ ([[1]] * 100000) | sum(start=[]) }}",
    "sorting": "{% set a = 'a' * 1000000 %}{% set b = 'a' * 999999 ~ 'a' %}{{ ([a, b] * 20000) | sort | length }}",
    "doubled by ~": DOUBLED,
    "doubled by +": DOUBLED.replace("~", "+"),
    "doubled by a block": "{% set x = 'ab' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "doubled by a macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{{ " + "m(" * 60 + "'ab'" + ")" * 60 + " }}",
    "doubled in a namespace": (
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
    ),
    "doubled lists": "{% set x = [1] %}" + "{% set x = x + x %}" * 60,
    "lists in lists": LISTS,
    "lists in lists, compared": LISTS + LISTS.replace("x", "y") + "{{ x == y }}",
    "dicts in dicts": "{% set x = 'a' %}" + "{% set x = dict(a=x, b=x) %}" * 60 + "{{ x }}",
    "dicts spelled": "{% set x = 'a' %}" + "{% set x = {'a': x, 'b': x} %}" * 60 + "{{ x | tojson }}",
    "lists in batches": "{% set x = ['a'] %}"
    + "{% set x = (x | batch(9) | list) * 2 %}" * 60
    + "{{ x | string | length }}",
    "namespaces in namespaces": "{% set x = 'a' %}" + "{% set x = namespace(a=x, b=x) %}" * 60 + "{{ x }}",
    "a cycle": "{% set ns = namespace(x=1) %}{% set ns.x = [ns, ns] %}{{ ns.x }}",
    "lipsum": "{{ lipsum(n=10**9) }}",
    "range": "{{ range(10**10) | list }}",
    "slices": BIG + "{% for i in range(99999) %}{% set t = s[1:] %}{% endfor %}",
}


def render(source: str, messages: list[dict[str, str]] = MESSAGES) -> str:
    return ChatTemplate(source, {}).render(
        messages, add_generation_prompt=True, continue_final_message=False, template_kwargs={}
    )


@pytest.mark.parametrize("name", list(ENDLESS))
def test_what_has_no_end_is_ended(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(ENDLESS[name])
    assert caught.value.param == "messages"
    assert "chat template" in str(caught.value)
    assert len(str(caught.value)) < 1200


@pytest.mark.parametrize("name", list(ENDLESS))
def test_it_is_ended_when_something_else_comes_first_too(name: str) -> None:
    """A budget is one rendering's: the next one has its own."""
    template = ChatTemplate("{% if messages[0].content == 'go' %}" + ENDLESS[name] + "{% endif %}fine", {})
    how = {"add_generation_prompt": True, "continue_final_message": False, "template_kwargs": {}}
    assert template.render(MESSAGES, **how) == "fine"  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError):
        template.render([{"role": "user", "content": "go"}], **how)  # type: ignore[arg-type]
    assert template.render(MESSAGES, **how) == "fine"  # type: ignore[arg-type]


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
        ("{{ 'a' | urlize }}", "urlize"),
    ],
)
def test_what_cannot_be_compiled_is_said_at_start(source: str, words: str) -> None:
    with pytest.raises(ConfigError, match="--chat-template") as caught:
        ChatTemplate(source, {})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


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


@pytest.mark.parametrize("num_messages", [0, 1, 2, 50])
def test_what_templates_do_is_what_jinja_does(num_messages: int) -> None:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    messages = (MESSAGES * 25)[:num_messages] or [{"role": "system", "content": "s\nt"}]
    expected = environment.from_string(USUAL).render(messages=messages, tools=None, documents=None)
    assert render(USUAL, messages) == expected


def test_a_long_conversation_has_what_it_takes() -> None:
    """A hundred steps for each message, and several times its text."""
    source = "{% for m in messages %}{% for c in range(80) %}{% endfor %}{{ m.content }}{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "word " * 200}] * 2000
    assert len(render(source, messages)) == 2000 * 2000
