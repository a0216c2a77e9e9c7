"""Rewrites messages for chat templates without their roles, tools or tool calls.

Templates differ in their treatment of `developer` messages and of `system` messages after the first turn, both of which
coding agents send: many refuse the latter, and some drop a role they do not know. Each is therefore tried once, at
start-up, and so is the form in which the template wants the arguments of earlier calls. A template without a section for
tools gets them in the system message, to be called in Hermes' format. Pure.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from engine.core.errors import InvalidRequestError
from engine.text.chat_template import ChatTemplate, in_parts

_PROBE = "quire-probe"
_PROBE_NAME, _PROBE_KEY = "quire_call_", "quire_argument_"
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
                fitted[-1]["content"] = _joined(fitted[-1]["content"], "\n\n", content)
            else:
                fitted.append({**message, "role": role, "content": content})
        return fitted


ALL_ROLES = KnownRoles()


class EarlierCalls(NamedTuple):
    """How a template shows the calls of earlier turns."""

    are_shown: bool = True
    as_text: bool = False  # it takes the arguments as JSON, not as an object
    needs_none: bool = False  # it shows calls only if the content is none
    one_at_a_time: bool = False  # it refuses several calls in a message, or shows only the first

    @classmethod
    def of(cls, template: ChatTemplate | None) -> EarlierCalls:
        """Return how a template shows calls, found by trying it."""
        if template is None:
            return cls()
        forms = [
            cls(as_text=as_text, needs_none=needs_none) for needs_none in (False, True) for as_text in (False, True)
        ]
        texts = [form.rendered(template) for form in forms]
        for form, text in zip(forms, texts, strict=True):
            if text is not None and _shows_calls(text, 1, as_text=form.as_text):
                several = form.rendered(template, num_calls=2) or ""
                return form._replace(one_at_a_time=not _shows_calls(several, 2, as_text=form.as_text))
        is_refused = all(text is None for text in texts)
        return cls(are_shown=is_refused or _PROBE_KEY in (texts[0] or ""))

    def fit(self, messages: Sequence[Message]) -> list[Message]:
        """Return the conversation in the form that the template shows."""
        fitted: list[Message] = []
        left = deque(messages)
        while left:
            message = left.popleft()
            calls = message.get("tool_calls")
            if not calls:
                fitted.append(message)
                continue
            if self.needs_none:
                if message["content"]:
                    fitted.append({name: value for name, value in message.items() if name != "tool_calls"})
                message = {**message, "content": None}
            if not self.one_at_a_time:
                fitted.append(message)
                continue
            results = []
            while left and left[0]["role"] == "tool":
                results.append(left.popleft())
            fitted += _one_at_a_time(message, results)
        return fitted

    def rendered(self, template: ChatTemplate, num_calls: int = 1) -> str | None:
        """Return a conversation with calls and results, or None if it is refused."""
        calls = []
        for index in range(num_calls):
            arguments = {f"{_PROBE_KEY}{index}": "x"}
            function = {
                "name": f"{_PROBE_NAME}{index}",
                "arguments": json.dumps(arguments) if self.as_text else arguments,
            }
            calls.append({"id": f"a0b1c2d3{index}", "type": "function", "function": function})
        results = [{"role": "tool", "content": "b", "name": _PROBE, "tool_call_id": call["id"]} for call in calls]
        content = None if self.needs_none else ""
        asked: list[Message] = [_QUESTION, {"role": "assistant", "content": content, "tool_calls": calls}]
        return _rendered(template, [*asked, *results])


def _shows_calls(text: str, num_calls: int, *, as_text: bool) -> bool:
    """Return True if a text has the names or arguments of calls, and no dictionary as Python writes it."""
    is_python = not as_text and f"'{_PROBE_KEY}" in text
    return not is_python and all(
        f"{_PROBE_NAME}{index}" in text or f"{_PROBE_KEY}{index}" in text for index in range(num_calls)
    )


def _one_at_a_time(message: Message, results: list[Message]) -> list[Message]:
    """Return a message for each call, with its result behind it."""
    split: list[Message] = []
    for call in message["tool_calls"]:
        split.append({**message, "tool_calls": [call]})
        message = {"role": message["role"], "content": None if message["content"] is None else ""}
        own = next((one for one in results if one.get("tool_call_id") in (call["id"], None)), None)
        if own is not None:
            results.remove(own)
            split.append(own)
    return split + results


def needs_descriptions(template: ChatTemplate | None) -> bool:
    """Return True if a template refuses a tool without a description, but none with one."""
    function = {"name": _PROBE_NAME, "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
    return (
        template is not None
        and _rendered(template, [_QUESTION], [{"type": "function", "function": function}]) is None
        and _rendered(template, [_QUESTION], [{"type": "function", "function": {**function, "description": ""}}])
        is not None
    )


ALL_CALLS = EarlierCalls()


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


def spell_out_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], spelled: Callable[[Sequence[Message]], str]
) -> list[dict[str, Any]]:
    """Return the conversation with tools, calls and results in plain text."""
    plain: list[dict[str, Any]] = []
    is_open = False  # the last one is the result of a tool
    for message in put_calls_in_content(messages, spelled):
        message.pop("tool_call_id", None)
        is_next, is_open = is_open, message["role"] == "tool"
        if is_open:
            content = _joined("<tool_response>\n", message["content"], "\n</tool_response>")
            message = {"role": "user", "content": content}
            if is_next:
                plain[-1]["content"] = _joined(plain[-1]["content"], "\n", content)  # templates want turns to alternate
                continue
        plain.append(message)
    return introduce_tools(plain, tools, _INTRODUCTION)


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


def _joined(*contents: Any) -> Any:
    """Return contents one after another: a text, or parts where one of them has parts."""
    if all(isinstance(each, str) for each in contents):
        return "".join(contents)
    return [part for each in contents for part in in_parts(each)]


def _shows(template: ChatTemplate, *messages: Message) -> bool:
    """Return True if the template shows the probe."""
    return _PROBE in (_rendered(template, messages) or "")


_QUESTION: Message = {"role": "user", "content": "quire-question"}
_ANSWER = "quire-answer"


def message_heads(template: ChatTemplate) -> dict[str, str]:
    """Return what a template writes before a message's content, from the end of the content before, by role."""
    heads = {}
    turns: list[Message] = [_QUESTION, {"role": "assistant", "content": _ANSWER}]
    for role, before in (("system", []), ("assistant", turns[:1]), ("user", turns), ("tool", turns)):
        text = _rendered(template, [*before, {"role": role, "content": _PROBE}, *([] if before else turns[:1])]) or ""
        if _PROBE in text:
            start = text.partition(_PROBE)[0]
            heads[role] = start.rpartition(before[-1]["content"])[2] if before else start
    return heads


def _rendered(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> str | None:
    """Return a conversation, or None if the template refuses it."""
    try:
        return template.render(
            messages, tools=tools, add_generation_prompt=True, continue_final_message=False, template_kwargs={}
        )
    except InvalidRequestError:
        return None
