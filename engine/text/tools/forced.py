"""Grammars of answers that must call tools, or answer in JSON. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from engine.text.grammars.spec import GrammarSpec
from engine.text.tools.base import MAX_CALLS, OfferedTool, any_of, embedded
from engine.text.tools.json_calls import FORCED, JsonFormat

# As models are shown their JSON: one space after a comma and a colon.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def forced_grammar(
    tools: Sequence[OfferedTool], tool_format: JsonFormat, *, max_calls: int | None, answer: GrammarSpec | None = None
) -> str:
    """Return Lark for calls in marks or as a list, or a JSON `answer` instead."""
    more = (max_calls or MAX_CALLS) - 1
    lines = [
        "start: calls" + (" | answer" if answer else ""),
        f"calls: {_calls(tool_format, more)}",
        f"call: {any_of('call', len(tools))}",
    ]
    for index, tool in enumerate(tools):
        head = json.dumps(f'{{"name": "{tool.name}", "arguments": ')
        lines += [f'call_{index}: {head} arguments_{index} "}}"', f"arguments_{index}: {tool.arguments(_SPACING)}"]
    if answer is not None:
        schema = json.loads(answer.text)
        spacing = {"whitespace_pattern": answer.whitespace} if answer.whitespace else {"whitespace_flexible": False}
        lines.append(f"answer: {embedded({} if schema is True else schema, **spacing, lenient=answer.is_lenient)}")
    return "\n".join(lines)


def _calls(tool_format: JsonFormat, more: int) -> str:
    if tool_format is FORCED:
        return f'"[" call (", " call){{0,{more}}} "]"' if more else '"[" call "]"'
    [(opening, closing)] = tool_format.marks
    one = f"{json.dumps(opening + chr(10))} call {json.dumps(chr(10) + closing)}"
    return f'{one} ("\\n" {one}){{0,{more}}}' if more else one
