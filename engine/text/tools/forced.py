"""Grammars of answers that must call tools, or answer in JSON. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from engine.core.errors import InvalidRequestError
from engine.text.grammars.spec import MAX_TEXT, GrammarSpec
from engine.text.tools.json_calls import FORCED, forced_objects
from engine.text.tools.tool_format import MAX_CALLS, OfferedTool, ToolFormat, embedded, repeated


def forced_grammar(
    tools: Sequence[OfferedTool],
    tool_format: ToolFormat | None,
    special_tokens: Mapping[str, int],
    *,
    max_calls: int | None,
    answer: GrammarSpec | None = None,
) -> tuple[str, ToolFormat]:
    """Return Lark for calls, or a JSON `answer` instead, and the format of the calls.

    They are in the model's format where it can enforce the schemas, else a list of JSON objects.
    """
    num_calls = max_calls or MAX_CALLS
    calls = None
    if tool_format is not None and (answer is None or tool_format.may_answer_instead):
        try:
            calls = tool_format.forced(tools, special_tokens, max_calls=num_calls)
        except InvalidRequestError:
            calls = None
    lines = _lines(calls, answer) if calls else []
    if tool_format is not None and lines and sum(map(len, lines)) + len(lines) <= MAX_TEXT:
        return "\n".join(lines), tool_format
    calls = [f'calls: "[" {repeated("call", ", ", num_calls - 1)} "]"', *forced_objects(tools)]
    return "\n".join(_lines(calls, answer)), FORCED


def _lines(calls: list[str], answer: GrammarSpec | None) -> list[str]:
    """Return the lines of a grammar of calls, or an answer instead."""
    if answer is None:
        return ["start: calls", *calls]
    schema = json.loads(answer.text)
    spacing = {"whitespace_pattern": answer.whitespace} if answer.whitespace else {"whitespace_flexible": False}
    instead = embedded({} if schema is True else schema, **spacing, lenient=answer.is_lenient)
    return ["start: calls | answer", *calls, f"answer: {instead}"]
