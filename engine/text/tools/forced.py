"""The grammar under which a model can write nothing but calls whose arguments are valid, or JSON as it was asked for.

For tool_choice required and named, and for tools beside a schema of the answer, which alone would rule out any call.

In llguidance's Lark. Each tool's schema is a grammar of its own, so that its references mean its own definitions. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from engine.text.grammars.spec import GrammarSpec
from engine.text.tools.dialects import FORCED, HERMES
from engine.text.tools.offered import MAX_CALLS, OfferedTool, embedded
from engine.text.tools.parser import Dialect

# As models are shown their JSON: one space behind a comma and a colon.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def forced_dialect(dialect: Dialect | None, *, marks_are_text: bool) -> Dialect:
    """How forced calls are written: with Hermes' marks if the model knows them, else as a JSON list."""
    return HERMES if dialect is HERMES and marks_are_text else FORCED


def forced_grammar(
    tools: Sequence[OfferedTool],
    dialect: Dialect,
    *,
    max_calls: int | None,
    answer: GrammarSpec | None = None,
) -> str:
    """Lark for one or more calls of `tools`, or for a JSON `answer` instead."""
    more = (max_calls or MAX_CALLS) - 1
    lines = [
        "start: calls" + (" | answer" if answer else ""),
        f"calls: {_calls(dialect, more)}",
        "call: " + " | ".join(f"call_{i}" for i in range(len(tools))),
    ]
    for index, tool in enumerate(tools):
        head = json.dumps(f'{{"name": "{tool.name}", "arguments": ')
        lines += [f'call_{index}: {head} arguments_{index} "}}"', f"arguments_{index}: {tool.arguments(_SPACING)}"]
    if answer is not None:
        schema = json.loads(answer.text)
        spacing = {"whitespace_pattern": answer.whitespace} if answer.whitespace else {"whitespace_flexible": False}
        lines.append(f"answer: {embedded({} if schema is True else schema, {**spacing, 'lenient': answer.is_lenient})}")
    return "\n".join(lines)


def _calls(dialect: Dialect, more: int) -> str:
    if dialect is FORCED:
        return f'"[" call (", " call){{0,{more}}} "]"' if more else '"[" call "]"'
    [(opening, closing)] = dialect.marks
    one = f"{json.dumps(opening + chr(10))} call {json.dumps(chr(10) + closing)}"
    return f'{one} ("\\n" {one}){{0,{more}}}' if more else one
