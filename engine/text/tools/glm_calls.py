"""Tool calls as GLM-4.5 and its successors write them: format, parser and grammar.

    <tool_call>name
    <arg_key>key</arg_key>
    <arg_value>value</arg_value>
    </tool_call>

GLM-4.7 leaves out the line breaks. As in xml_calls.py the result does not depend on how the text was cut, text that is
not a call is content, unchanged, and nothing raises. The end of a value or of a call may be missing. One parser for each
choice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from engine.text.tools.text_values import TextValuesParser
from engine.text.tools.tool_format import CallParser, OfferedTool, ToolFormat, Tools, any_of, free_text, literal
from engine.text.tools.value_grammar import ValueGrammar, calls_in_order

OPENING, CLOSING = "<tool_call>", "</tool_call>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"
_ENDS = {END_VALUE: len(END_VALUE), CLOSING: 0}  # the texts that end a value, and how much of each is read with it
_NAME = re.compile(r"\s*([a-zA-Z0-9_.-]{1,128})\s*")
_PART_OF_NAME = re.compile(r"\s*[a-zA-Z0-9_.-]{0,128}\s*")
_MAX_SPACE = 300  # characters around a name
_KEY_NAME = re.compile(r"(?!\s)[^\n<>]{1,256}(?<!\s)")
_PARAMETER = re.compile(rf"{KEY}\s*([^\n<>]{{1,256}}?)\s*{END_KEY}\s*{VALUE}")
_PART_OF_KEY = re.compile(r"[^<>]{0,300}")


class GlmFormat(ToolFormat):
    """Calls whose keys and values are between tags."""

    def parser(self, tools: Tools) -> CallParser:
        return GlmCallParser(tools)

    def grammar(self, tools: Sequence[OfferedTool], special_tokens: Mapping[str, int], *, parallel: bool) -> str:
        lines = free_text(OPENING, special_tokens, parallel=parallel)
        return "\n".join([*lines, *_calls("calls", tools, special_tokens, is_forced=False)])

    def forced(self, tools: Sequence[OfferedTool], special_tokens: Mapping[str, int], *, max_calls: int) -> list[str]:
        return [
            f"calls: one (NEWLINE one){{0,{max_calls - 1}}}" if max_calls > 1 else "calls: one",
            f"one: {literal(OPENING, special_tokens)} call",
            *_calls("call", tools, special_tokens, is_forced=True),
        ]


GLM45 = GlmFormat(
    name="glm45",
    aliases=("glm47", "glm4_moe"),
    signs=(KEY,),
    openings=(OPENING,),
    inner=(CLOSING, KEY, END_KEY, VALUE, END_VALUE),
    ends_thoughts=True,
)


class GlmCallParser(TextValuesParser):
    """`push` text, `finish` at its end. `tools` has the schemas of parameters."""

    def __init__(self, tools: Tools) -> None:
        super().__init__((OPENING,), tools, _ENDS)
        self._closing = CLOSING

    def _opened(self, mark: str) -> None:  # noqa: ARG002 - there is one
        self._step = self._name

    def _name(self) -> bool:
        """Read the name of a tool, which may be followed by its first key or the end."""
        name, tag, _ = self._buffer.partition("<")
        if not tag:
            return not (_PART_OF_NAME.fullmatch(name) and len(name) <= _MAX_SPACE) and self._no_call()
        match, rest = _NAME.fullmatch(name), self._buffer[len(name) :]
        if match is None or match[1] not in self._tools or len(name) > _MAX_SPACE:
            return self._no_call()
        if not rest.startswith((KEY, CLOSING)):
            return not (KEY.startswith(rest) or CLOSING.startswith(rest)) and self._no_call()
        self._begin_call(match[1])
        self._buffer = rest
        return True

    def _members(self) -> bool:
        if self._reads_parameter(_PARAMETER):
            return True
        if not self._buffer.startswith(CLOSING) and self._is_part_of_tag(self._buffer):
            return False
        self._end_call()
        return True

    def _is_part_of_tag(self, text: str) -> bool:
        if KEY.startswith(text) or CLOSING.startswith(text):
            return True
        key = text.removeprefix(KEY)
        if key == text:
            return False
        name, tag, rest = key.partition("<")
        if not _PART_OF_KEY.fullmatch(name):
            return False
        rest = (tag + rest).removeprefix(END_KEY)
        return END_KEY.startswith(rest) or VALUE.startswith(rest.lstrip())


def _calls(rule: str, tools: Sequence[OfferedTool], special_tokens: Mapping[str, int], *, is_forced: bool) -> list[str]:
    """Return Lark whose `rule` is a call after its opening mark, up to its end."""
    values = ValueGrammar("", "", END_VALUE, ("<\\/tool_call>",), special_tokens)
    key, end_key, opening, closing = (literal(mark, special_tokens) for mark in (KEY, END_KEY, VALUE, CLOSING))
    begun = json.dumps, lambda name: f"{key} {json.dumps(name)} {end_key} NEWLINE {opening}"
    return [
        f"{rule}: ({any_of('call', len(tools))}) NEWLINE {closing}",
        "NEWLINE: /\\n?/",
        f"free: (NEWLINE {key} /[^\\n<>]{{1,256}}/ {end_key} NEWLINE {opening} string)*",
        *values.lines(),
        *calls_in_order(tools, _KEY_NAME, values, begun, before="NEWLINE", is_forced=is_forced),
    ]
