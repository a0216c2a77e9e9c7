"""Messages reach templates that lack their roles: nothing is left out, and nothing is refused that can be said otherwise."""

from __future__ import annotations

import pytest

from engine.core.errors import InvalidRequestError
from engine.text.chat_template import ChatTemplate
from engine.text.message_fallbacks import KnownRoles

EVERY = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
SILENT = "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
STRICT = (
    "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}{% set turns = messages[1:] %}{% else %}"
    "{% set turns = messages %}{% endif %}{% for m in turns %}{% if m.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}"
    "{{ raise_exception('roles must alternate, not ' + m.role) }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def messages(*pairs: str) -> list[dict[str, str]]:
    return [dict(zip(("role", "content"), pair.split(":"), strict=True)) for pair in pairs]


def shown(source: str, *pairs: str) -> str:
    template = ChatTemplate(source, {})
    fitted = KnownRoles.of(template).fit(messages(*pairs))
    return template.render(fitted, add_generation_prompt=False, continue_final_message=False, template_kwargs={})


def test_a_template_is_tried() -> None:
    assert KnownRoles.of(None) == (True, True)
    known = [KnownRoles.of(ChatTemplate(source, {})) for source in (EVERY, SILENT, STRICT)]
    assert known == [(True, True), (False, True), (False, False)]


def reminder(text: str) -> str:
    return f"<system-reminder>\n{text}\n</system-reminder>"


@pytest.mark.parametrize(
    ("pairs", "prompt"),
    [
        (("developer:a", "developer:b", "user:c"), "[system]a\n\nb[user]c"),
        (("system:a", "developer:b", "user:c"), "[system]a\n\nb[user]c"),
        (("user:a", "system:b"), f"[user]a\n\n{reminder('b')}"),
        (("user:a", "system:b", "assistant:c"), f"[user]a\n\n{reminder('b')}[assistant]c"),
        (("user:a", "system:b", "user:c"), f"[user]a\n\n{reminder('b')}\n\nc"),
        (("user:a", "assistant:b", "system:c", "user:d"), f"[user]a[assistant]b[user]{reminder('c')}\n\nd"),
        (
            ("user:a", "assistant:b", "system:c", "developer:d", "user:e", "assistant:f"),
            f"[user]a[assistant]b[user]{reminder('c')}\n\n{reminder('d')}\n\ne[assistant]f",
        ),
    ],
)
def test_late_system_messages_join_the_users_turn(pairs: tuple[str, ...], prompt: str) -> None:
    assert shown(STRICT, *pairs) == prompt


def test_what_a_template_has_stays() -> None:
    pairs = ("developer:a", "developer:b", "user:c", "system:d", "user:e")
    assert shown(EVERY, *pairs) == "[developer]a[developer]b[user]c[system]d[user]e"
    assert shown(SILENT, *pairs) == "[system]a[system]b[user]c[system]d[user]e"


def test_turns_of_the_users_own_are_left_as_they_are() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        shown(STRICT, "user:a", "user:b")
