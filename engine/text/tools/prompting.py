"""Tools for models whose chat template has no place for them: described in the system message, called in Hermes' way.

What templates with tools do themselves is done here in plain text: tools, calls made earlier, and their results. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INTRODUCTION = """You can call these functions, each described by a line of JSON:
{tools}
To call one, write its name and its arguments as JSON between two tags, like this:
<tool_call>
{{"name": "name_of_function", "arguments": {{"argument": "value"}}}}
</tool_call>
The result then comes between <tool_response> tags. Where no function helps, answer in words."""


def spell_out(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation in roles and words alone, for a template that knows nothing else."""
    spelled: list[dict[str, Any]] = []
    for message in messages:
        words = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
        if message.get("tool_calls"):
            calls = [_spell_call(call["function"]) for call in message["tool_calls"]]
            words["content"] = "\n".join([text for text in (message["content"],) if text] + calls)
        if message["role"] == "tool":
            words = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
            if spelled and spelled[-1]["role"] == "user" and spelled[-1]["content"].startswith("<tool_response>"):
                spelled[-1]["content"] += "\n" + words["content"]  # templates want turns to alternate
                continue
        spelled.append(words)
    if tools:
        _introduce(spelled, tools)
    return spelled


def _spell_call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _introduce(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> None:
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    introduction = _INTRODUCTION.format(tools="\n".join(lines))
    if messages[0]["role"] in ("system", "developer"):
        messages[0]["content"] += "\n\n" + introduction
    else:
        messages.insert(0, {"role": "system", "content": introduction})
