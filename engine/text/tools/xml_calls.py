"""Tool calls in XML, as Qwen3-Coder writes them: format, parser and grammar.

    <tool_call>
    <function=name>
    <parameter=name>
    value
    </parameter>
    </function>
    </tool_call>

The result does not depend on how the text was cut, text that is not a call is content, unchanged, and nothing raises. The
tags around a function may be missing, and so may the end of a parameter or of the function, which models forget. One
parser for each choice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from engine.text.tools.text_values import TextValuesParser
from engine.text.tools.tool_format import SPACE, CallParser, OfferedTool, ToolFormat, Tools, any_of, literal, repeated
from engine.text.tools.value_grammar import ValueGrammar, calls_in_order

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
# The texts that end a value, and how much of each is read with the value.
_ENDS = {
    "\n" + END_PARAMETER: len(END_PARAMETER) + 1,
    END_PARAMETER: len(END_PARAMETER),
    "\n" + PARAMETER: 1,
    "\n" + END_FUNCTION: 1,
}
_NAME = re.compile(r"([a-zA-Z0-9_.-]{1,128})>")
_PART_OF_NAME = re.compile(r"[a-zA-Z0-9_.-]{0,128}")
_PARAMETER_NAME = re.compile(r"[^\n<>]{1,256}")
_PARAMETER = re.compile(f"{PARAMETER}({_PARAMETER_NAME.pattern})>(\n|(?=.))")  # a line break is no part of the value
_PART_OF_PARAMETER = re.compile(PARAMETER + r"[^\n<>]{0,256}>?")


class XmlFormat(ToolFormat):
    """Calls whose names and parameters are tags."""

    def parser(self, tools: Tools) -> CallParser:
        return XmlCallParser(tools)

    def grammar(self, tools: Sequence[OfferedTool], special_tokens: Mapping[str, int], *, parallel: bool) -> str:
        is_token, space = OPENING in special_tokens, f"/{SPACE}/"
        lines = [
            f"start: (tagged | bare){'*' if parallel else '?'} TEXT",
            "TEXT: /(?s:.*)/",
            f"opened{'' if is_token else '[lazy]'}: TEXT {literal(OPENING, special_tokens)}",
            f"function[lazy]: TEXT {json.dumps(FUNCTION)}",
            f"end: {space} {literal(CLOSING, special_tokens)}",
            f"tagged: opened {space} {json.dumps(FUNCTION)} call end",
            "bare: function call end",
        ]
        return "\n".join([*lines, *_calls(tools, is_forced=False)])

    def forced(self, tools: Sequence[OfferedTool], special_tokens: Mapping[str, int], *, max_calls: int) -> list[str]:
        opening, closing = (literal(mark, special_tokens) for mark in (OPENING, CLOSING))
        return [
            f"calls: {repeated('one', chr(10), max_calls - 1)}",
            f'one: {opening} "\\n{FUNCTION}" call "\\n" {closing}',
            *_calls(tools, is_forced=True),
        ]


QWEN3_CODER = XmlFormat(
    name="qwen3_coder",
    aliases=("qwen3_xml",),
    signs=(OPENING, FUNCTION),
    openings=(OPENING,),
    inner=(CLOSING,),
    ends_thoughts=True,
)


class XmlCallParser(TextValuesParser):
    """`push` text, `finish` at its end. `tools` has the schemas of parameters."""

    def __init__(self, tools: Tools) -> None:
        super().__init__((OPENING, FUNCTION), tools, _ENDS)
        self._closing = CLOSING
        self._is_tagged = False  # the function is between tags

    def _opened(self, mark: str) -> None:
        self._is_tagged = mark == OPENING
        self._step = self._tagged if self._is_tagged else self._name

    def _tagged(self) -> bool:
        """Read the beginning of a function after the opening tag."""
        self._skip_space()
        if self._buffer.startswith(FUNCTION):
            self._hold(len(FUNCTION))
            self._step = self._name
            return True
        return not FUNCTION.startswith(self._buffer) and self._no_call()

    def _name(self) -> bool:
        match = _NAME.match(self._buffer)
        if match is None:
            return not _PART_OF_NAME.fullmatch(self._buffer) and self._no_call()
        if not self._is_tagged and match[1] not in self._tools:
            return self._no_call()
        self._begin_call(match[1])
        self._buffer = self._buffer[match.end() :]
        return True

    def _members(self) -> bool:
        if self._reads_parameter(_PARAMETER):
            return True
        buffer = self._buffer
        if buffer.startswith(END_FUNCTION):
            self._buffer = buffer[len(END_FUNCTION) :]
        elif END_FUNCTION.startswith(buffer) or _begins_parameter(buffer):
            return False
        self._end_call()
        return True

    def _is_part_of_tag(self, text: str) -> bool:
        return END_FUNCTION.startswith(text) or CLOSING.startswith(text) or _begins_parameter(text)


def _begins_parameter(text: str) -> bool:
    """Return True if more text may complete the tag of a parameter."""
    return PARAMETER.startswith(text) or _PART_OF_PARAMETER.fullmatch(text) is not None


def _calls(tools: Sequence[OfferedTool], *, is_forced: bool) -> list[str]:
    """Return Lark whose rule `call` is a function from its name to its end."""
    values = ValueGrammar("\n", "\n", END_PARAMETER, ("\\n" + PARAMETER, "\\n<\\/function>"), {})
    space, end = f"/{SPACE}/", json.dumps(END_FUNCTION)
    begun = lambda name: f'"{name}>"', lambda name: json.dumps(f"{PARAMETER}{name}>")
    return [
        f"call: {any_of('call', len(tools))}",
        f'free: ({space} "{PARAMETER}" /[^\\n<>]{{1,256}}/ ">\\n" string)* {space} {end}',
        *values.lines(),
        *calls_in_order(tools, _PARAMETER_NAME, values, begun, before=space, end=f"{space} {end}", is_forced=is_forced),
    ]
