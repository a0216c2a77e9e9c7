"""Rewrites messages for chat templates without their roles, tools or tool calls.

Templates differ in their treatment of `developer` messages and of `system` messages after the first turn, both of which
coding agents send: many refuse the latter, and some drop a role they do not know. Each is therefore tried once, at
start-up, and so is the form in which the template wants the arguments of earlier calls. A template without a section for
tools gets them in the system message, to be called in Hermes' format. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

from engine.core.errors import InvalidRequestError
from engine.text.chat_template import ChatTemplate

_PROBE = "quire-probe"
_PROBE_NAME, _PROBE_KEY = "quire_probe", "quire_probe_key"
_INTRODUCTION = """You can call these functions, each described by a line of JSON:
{tools}
To call one, write its name and its arguments as JSON between two tags, like this:
<tool_call>
{{"name": "name_of_function", "arguments": {{"argument": "value"}}}}
</tool_call>
The result then comes between <tool_response> tags. Where no function helps, answer in words."""

Message = Mapping[str, Any]


class KnownRoles(NamedTuple):
    """The roles that a template can show, besides those that every template can."""

    developer: bool = True
    late_system: bool = True  # after another message

    @classmethod
    def of(cls, template: ChatTemplate | None) -> KnownRoles:
        """Return the roles that a template shows, found by trying them."""
        if template is None:
            return cls()
        return cls(
            developer=_shows(template, {"role": "developer", "content": _PROBE}, {"role": "user", "content": "a"}),
            late_system=_shows(template, {"role": "user", "content": "a"}, {"role": "system", "content": _PROBE}),
        )

    def fit(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages in roles that the template has.

        `developer` becomes `system`. A `system` message that the template cannot show joins the system prompt if it
        follows it directly, else the user's turn, marked.
        """
        if self.developer and self.late_system:
            return messages
        fitted: list[dict[str, Any]] = []
        is_open = False  # the last user turn ends with a marked system message, and the user's text continues it
        for message in messages:
            role = "system" if message["role"] == "developer" and not self.developer else message["role"]
            content, before = message["content"], fitted[-1]["role"] if fitted else None
            if role == "system" and before not in (None, "system") and not self.late_system:
                role, content = "user", f"<system-reminder>\n{content}\n</system-reminder>"
                joins, is_open = before == "user", True
            else:
                joins = before == role and (is_open if role == "user" else role == "system" and not self.late_system)
                is_open = False
            if joins:
                fitted[-1]["content"] += f"\n\n{content}"
            else:
                fitted.append({**message, "role": role, "content": content})
        return fitted


ALL_ROLES = KnownRoles()


class EarlierCalls(Enum):
    """How a template shows the calls of earlier turns."""

    WITH_OBJECTS = auto()  # it writes the arguments' objects itself
    WITH_TEXT = auto()  # it takes the arguments as JSON
    NOT = auto()

    @classmethod
    def of(cls, template: ChatTemplate | None) -> EarlierCalls:
        """Return how a template shows calls, found by trying both forms of arguments."""
        if template is None:
            return cls.WITH_OBJECTS
        with_object = _with_call(template, {_PROBE_KEY: "x"})
        shows_object = with_object is not None and _PROBE_NAME in with_object
        if shows_object and f"'{_PROBE_KEY}'" not in (with_object or ""):  # as Python writes a dictionary
            return cls.WITH_OBJECTS
        with_text = _with_call(template, json.dumps({_PROBE_KEY: "x"}))
        if with_text is not None and _PROBE_NAME in with_text:
            return cls.WITH_TEXT
        is_refused = with_object is None and with_text is None
        return cls.WITH_OBJECTS if shows_object or is_refused else cls.NOT


def put_calls_in_content(
    messages: Sequence[Message], spelled: Callable[[Sequence[Message]], str]
) -> Sequence[dict[str, Any]]:
    """Return the conversation with earlier calls at the end of their message's content."""
    return [
        {
            **{name: value for name, value in message.items() if name != "tool_calls"},
            "content": "\n".join(filter(None, (message["content"], spelled(message["tool_calls"])))),
        }
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def spell_out_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the conversation with tools, calls and results in plain text."""
    spelled: list[dict[str, Any]] = []
    for message in messages:
        plain = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
        if message.get("tool_calls"):
            calls = [_spell_call(call["function"]) for call in message["tool_calls"]]
            plain["content"] = "\n".join([text for text in (message["content"],) if text] + calls)
        if message["role"] == "tool":
            plain = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
            if spelled and spelled[-1]["role"] == "user" and spelled[-1]["content"].startswith("<tool_response>"):
                spelled[-1]["content"] += "\n" + plain["content"]  # templates want turns to alternate
                continue
        spelled.append(plain)
    return introduce_tools(spelled, tools, _INTRODUCTION)


def _spell_call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def introduce_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], introduction: str
) -> list[dict[str, Any]]:
    """Return the conversation with tools in the system message."""
    introduced = [dict(message) for message in messages]
    if not tools:
        return introduced
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    text = introduction.format(tools="\n".join(lines))
    if introduced and introduced[0]["role"] in ("system", "developer"):
        introduced[0]["content"] += "\n\n" + text
    else:
        introduced.insert(0, {"role": "system", "content": text})
    return introduced


def _shows(template: ChatTemplate, *messages: Message) -> bool:
    """Return True if the template shows the probe."""
    return _PROBE in (_rendered(template, messages) or "")


def _with_call(template: ChatTemplate, arguments: Any) -> str | None:
    """Return a conversation with a call and its result, or None if the template refuses it."""
    call = {"id": "a0b1c2d3e", "type": "function", "function": {"name": _PROBE_NAME, "arguments": arguments}}
    return _rendered(
        template,
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "b", "name": _PROBE, "tool_call_id": call["id"]},
        ],
    )


def _rendered(template: ChatTemplate, messages: Sequence[Message]) -> str | None:
    try:
        return template.render(messages, add_generation_prompt=True, continue_final_message=False, template_kwargs={})
    except InvalidRequestError:
        return None
