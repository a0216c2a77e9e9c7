"""Tool calls in Python, as Llama 3.2, Llama 4, OLMo 3 and LFM2 write them: formats, parser and grammar.

    [name(key="value", other=1), other_name()]

Without a mark, only an answer that begins with the list of calls has any, and they name the request's tools. Arguments are
translated into JSON as they arrive. As in json_calls.py the result does not depend on how the text was cut, text that is
not a call is content, unchanged, a fault within arguments stays in them, and nothing raises. One parser for each choice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.text.tools.json_arguments import ArgumentsParser
from engine.text.tools.python_literals import LiteralReader
from engine.text.tools.text_values import types_of
from engine.text.tools.tool_format import (
    MAX_CALLS,
    SPACE,
    SPACING,
    CallParser,
    Message,
    OfferedTool,
    ToolFormat,
    Tools,
    any_of,
    embedded,
    literal,
    repeated,
)
from engine.text.tools.value_grammar import Parameter, arguments_in_order, refusal, self_contained
from engine.text.types import Piece

_NAME = r"[a-zA-Z_][a-zA-Z0-9_.-]{0,127}"
_KEY = r"[a-zA-Z_]\w{0,127}"
_GAP = r"\s{0,100}"
_HEAD = re.compile(rf"({_NAME}){_GAP}\({_GAP}(?=\)|{_KEY}{_GAP}=[^=])")
_PART_OF_HEAD = re.compile(rf"(?:{_NAME}{_GAP}(?:\({_GAP}(?:{_KEY}{_GAP}=?)?)?)?")
_ARGUMENT = re.compile(rf"({_KEY}){_GAP}=(?=[^=])")
_PART_OF_ARGUMENT = re.compile(rf"{_KEY}{_GAP}=?")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PythonFormat(ToolFormat):
    """Calls as Python would write them."""

    closing: str = ""  # the mark after calls that began with a mark
    is_listed: bool = True  # calls are between square brackets; else each has a line
    is_marked: bool = True  # the model writes the marks, if there are any; else it may

    @property
    def markup(self) -> frozenset[str]:
        return frozenset((*self.openings, self.closing)) - {""}

    def parser(self, tools: Tools) -> CallParser:
        return PythonCallParser(self, tools)

    def grammar(self, tools: Sequence[OfferedTool], special_tokens: Mapping[str, int], *, parallel: bool) -> str:
        more = MAX_CALLS - 1 if parallel else 0
        starts = []
        lines = ["TEXT: /(?s:.*)/" + (f" & ~{_bare_head(tools)}" if self.is_listed else "")]
        if self.openings:
            [opening] = self.openings
            is_token = opening in special_tokens
            starts.append(f"tagged{'*' if parallel else '?'} TEXT")
            lines += [
                f"opened{'' if is_token else '[lazy]'}: TEXT {literal(opening, special_tokens)}",
                f"tagged: opened /{SPACE}/ {self._listed(more)} /{SPACE}/ {literal(self.closing, special_tokens)}",
            ]
        else:
            starts.append("TEXT")
        if self.is_listed:  # everything that could still be text must be one lexeme
            starts.append("bare")
            lines.append(f"bare: ({any_of('bare', len(tools))}) (SEPARATOR call){{0,{more}}} /{SPACE}\\]/")
            lines += [
                f"bare_{index}: /{SPACE}\\[{SPACE}{re.escape(tool.name)}\\(/ arguments_{index}"
                for index, tool in enumerate(tools)
            ]
        return "\n".join([f"start: {' | '.join(starts)}", *lines, *_calls(tools, is_forced=False)])

    def forced(self, tools: Sequence[OfferedTool], special_tokens: Mapping[str, int], *, max_calls: int) -> list[str]:
        between, opening, closing = (", ", '"["', '"]"') if self.is_listed else ("\n", "", "")
        if self.openings and self.is_marked:
            opening = f"{literal(self.openings[0], special_tokens)} {opening}"
            closing = f"{closing} {literal(self.closing, special_tokens)}"
        return [
            f"calls: {opening} {repeated('call', between, max_calls - 1)} {closing}",
            *_calls(tools, is_forced=True),
        ]

    @property
    def spells_calls(self) -> bool:
        return self.is_listed

    def spelled(self, calls: Sequence[Message]) -> str:
        written = [f"{each['function']['name']}({_spelled(each['function']['arguments'])})" for each in calls]
        return f"{''.join(self.openings)}[{', '.join(written)}]{self.closing}"

    def _listed(self, more: int) -> str:
        if self.is_listed:
            return f'"[" call (SEPARATOR call){{0,{more}}} "]"'
        return f"call (/{SPACE}/ call){{0,{more}}}"


def _spelled(arguments: object) -> str:
    """Return arguments between the brackets of a call; those that a client sent as a text that is no JSON object, as it is."""
    if not isinstance(arguments, Mapping):
        return str(arguments)
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


LLAMA4_PYTHONIC = PythonFormat(
    name="llama4_pythonic",
    signs=("[func_name1(", "<|header_start|>"),
    openings=("<|python_start|>",),
    closing="<|python_end|>",
    is_marked=False,
)
PYTHONIC = PythonFormat(name="pythonic", signs=("[func_name1(",))
OLMO3 = PythonFormat(
    name="olmo3",
    signs=("<function_calls>",),
    openings=("<function_calls>",),
    closing="</function_calls>",
    is_listed=False,
)
LFM2 = PythonFormat(  # templates list the tools, and most show no calls
    name="lfm2",
    signs=("List of tools: ",),
    openings=("<|tool_call_start|>",),
    closing="<|tool_call_end|>",
)


class PythonCallParser(ArgumentsParser):
    """`push` text, `finish` at its end."""

    def __init__(self, tool_format: PythonFormat, tools: Tools) -> None:
        super().__init__(tool_format.openings)
        self._format = tool_format
        self._tools = tools
        self._in_list = False
        self._is_marked = False  # these calls began with a mark
        self._has_arguments = False

    def finish(self) -> list[Piece]:
        if self._step == self._read_arguments:
            self._arguments(self._buffer)
        if self._step in (self._read_arguments, self._argument, self._next):
            self._buffer = ""  # else a part of a key, or space
        return super().finish()

    def _text(self) -> bool:
        if self._is_fresh and self._format.is_listed and self._buffer.lstrip().startswith("["):
            self._skip_space()
            self._opened("")
            return True
        return super()._text()

    def _opened(self, mark: str) -> None:
        self._is_fresh, self._is_marked = False, bool(mark)
        self._closing = self._format.closing if mark else ""
        self._step = self._bracket if self._format.is_listed else self._head

    def _bracket(self) -> bool:
        """Read the bracket before calls."""
        first = self._skip_space()
        if not first:
            return False
        if first != "[":
            return self._no_call()
        self._hold(1)
        self._in_list, self._step = True, self._head
        return True

    def _head(self) -> bool:
        """Read the name of a call."""
        self._skip_space()
        head = _HEAD.match(self._buffer)
        if head is None or not (self._is_marked or head[1] in self._tools):
            is_open = head is None and _PART_OF_HEAD.fullmatch(self._buffer)
            if not is_open:
                self._in_list = False
            return not is_open and self._no_call()
        self._begin(head[1])
        self._buffer = self._buffer[head.end() :]
        self._has_arguments, self._step = False, self._argument
        return True

    def _argument(self) -> bool:
        """Read the name of an argument, or the end of the call."""
        self._buffer = buffer = self._buffer.lstrip()
        if buffer.startswith(")"):
            return self._end_call()
        match = _ARGUMENT.match(buffer)
        if match is None:
            if not buffer or _PART_OF_ARGUMENT.fullmatch(buffer):
                return False
            self._step = self._broken
            return True
        self._arguments((", " if self._has_arguments else "{") + json.dumps(match[1], ensure_ascii=False) + ": ")
        self._buffer, self._has_arguments = buffer[match.end() :], True
        self._scanner, self._step = LiteralReader(), self._read_arguments
        return True

    def _end_arguments(self) -> None:
        self._step = self._next

    def _next(self) -> bool:
        """Read the text after a value."""
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        if self._buffer.startswith(")"):
            return self._end_call()
        if self._buffer.startswith(","):
            self._buffer, self._step = self._buffer[1:], self._argument
        else:
            self._step = self._broken
        return True

    def _end_call(self) -> bool:
        self._arguments("}" if self._has_arguments else "{}")
        self._buffer, self._step = self._buffer[1:], self._after
        return True

    def _after(self) -> bool:
        """Read the text after a call: another one, the end of all, or content."""
        first = self._skip_space()
        if self._in_list:
            if first == "]":
                self._in_list = False
                self._held, self._buffer = "", self._buffer[1:]
            elif first == ",":
                self._hold(1)
                self._step = self._head
            elif first:
                self._in_list = False
                return self._no_call()
            return bool(first)
        if not self._format.is_listed and not self._closing.startswith(self._buffer[: len(self._closing)]):
            self._step = self._head
            return True
        return super()._after()

    def _broken(self) -> bool:
        has_ended = super()._broken()
        self._in_list = self._in_list and not has_ended
        return has_ended


# -- grammar -----------------------------------------------------------------------------------------------------------
# Values are JSON, which the parser reads as well, but for the words True, False and None where only these can be.

_FREE = [
    'free: (named (SEPARATOR named)*)? ")"',
    "named: /[a-zA-Z_][a-zA-Z0-9_]{0,127}=/ item",
    'item: ITEM | "[" (item (SEPARATOR item)*)? "]" | "{" (pair (SEPARATOR pair)*)? "}"',
    "pair: item COLON item",
    r"""ITEM: /"(\\.|[^"\\\n])*"|'(\\.|[^'\\\n])*'|True|False|None|-?[0-9]{1,18}(\.[0-9]{1,18})?([eE][-+]?[0-9]{1,2})?/""",
    "COLON: /: ?/",
    "SEPARATOR: /,[ \\n]?/",
]


def _calls(tools: Sequence[OfferedTool], *, is_forced: bool) -> list[str]:
    """Return Lark whose rule `call` is one of the tools' calls."""
    lines = [f"call: {any_of('call', len(tools))}", *_FREE]
    for index, tool in enumerate(tools):
        if not re.fullmatch(_NAME, tool.name):
            raise refusal(f"a function cannot be named {tool.name!r}", "rename it")
        lines.append(f'call_{index}: "{tool.name}(" arguments_{index}')
        lines += arguments_in_order(tool, index, re.compile(_KEY), _written, between=", ", end=")", is_forced=is_forced)
    return lines


def _written(each: Parameter, tool: OfferedTool) -> str:
    """Return Lark for an argument."""
    types, schema = types_of(tool.parameters, each.name), each.schema
    if types in ({"boolean"}, {"null"}) and isinstance(schema, Mapping) and not schema.keys() & {"enum", "const"}:
        return f'"{each.name}=" ' + ('("True" | "False")' if "boolean" in types else '"None"')
    spacing = SPACING if not types or types & {"array", "object"} else {}  # of which other values have none
    value = embedded(self_contained(each.name, schema, tool.parameters), **spacing, lenient=not tool.strict)
    return f'"{each.name}=" {value}'


def _bare_head(tools: Sequence[OfferedTool]) -> str:
    """Return a regex of text that begins as a list of calls."""
    names = "|".join(re.escape(tool.name) for tool in tools)
    return rf"/\s*\[\s*({names})\((?s:.*)/"
