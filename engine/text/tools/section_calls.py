"""Tool calls in a section between marks, each with a header and JSON arguments: Kimi-K2's and DeepSeek's.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
    <|tool_calls_section_end|>

As in json_calls.py the result does not depend on how the text was cut, text that is not a call is content, unchanged, and
nothing raises. The marks of the section may be missing, and so may the end of a call. One parser for each choice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.text.tools.json_arguments import ArgumentsParser, JsonScanner
from engine.text.tools.tool_format import (
    MAX_CALLS,
    SPACING,
    CallParser,
    Message,
    OfferedTool,
    ToolFormat,
    Tools,
    any_of,
    free_text,
    literal,
    repeated,
    with_ids,
)

_NAME = r"(?P<name>[a-zA-Z0-9_.-]{1,128})"
_NUMBER = "{number}"  # of a call, in a header
_MAX_HEADER = 300  # characters; a longer one is not a header


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SectionFormat(ToolFormat):
    """Calls with a header, in one section of an answer."""

    section_end: str
    call: tuple[str, str]  # the marks around one call
    header: str  # a regex of the text between a call's mark and its arguments
    written: tuple[str, ...]  # the same as a grammar writes it, mark by mark; `{name}` is the tool's
    has_ids: bool = False  # a header is the call's id as well
    after: str = ""  # the text between the arguments and the end of a call
    between: str = ""  # the text between two calls

    @property
    def markup(self) -> frozenset[str]:
        return frozenset((*self.openings, self.section_end, *self.call, *self.inner))

    def parser(self, tools: Tools) -> CallParser:
        return SectionParser(self, tools)

    def grammar(self, tools: Sequence[OfferedTool], special_tokens: Mapping[str, int], *, parallel: bool) -> str:
        lines = free_text(self.openings[0], special_tokens, parallel=parallel)
        num_calls = MAX_CALLS if parallel else 1
        return "\n".join([*lines, *self._section(tools, special_tokens, num_calls, "calls", is_forced=False)])

    def forced(self, tools: Sequence[OfferedTool], special_tokens: Mapping[str, int], *, max_calls: int) -> list[str]:
        section = self._section(tools, special_tokens, max_calls, "section", is_forced=True)
        return [f"calls: {literal(self.openings[0], special_tokens)} section", *section]

    def _section(
        self,
        tools: Sequence[OfferedTool],
        special_tokens: Mapping[str, int],
        max_calls: int,
        rule: str,
        *,
        is_forced: bool,
    ) -> list[str]:
        """Return Lark for the calls after the opening mark, and the closing mark."""
        begin, end, section_end = (literal(mark, special_tokens) for mark in (*self.call, self.section_end))
        lines = [
            f"{rule}: {repeated('call', self.between, max_calls - 1)} {section_end}",
            f"call: {begin} ({any_of('call', len(tools))}) {json.dumps(self.after) if self.after else ''} {end}",
            "number: /[0-9]{1,4}/",
        ]
        for index, tool in enumerate(tools):
            arguments = tool.arguments(SPACING) if is_forced else tool.free_arguments()
            lines += [f"call_{index}: {self._head(tool.name, special_tokens)} arguments_{index}"]
            lines += [f"arguments_{index}: {arguments}"]
        return lines

    def _head(self, name: str, special_tokens: Mapping[str, int]) -> str:
        return " ".join(
            "number" if part == _NUMBER else literal(part.format(name=name), special_tokens) for part in self.written
        )


class KimiFormat(SectionFormat):
    """Calls whose ids count through the conversation, and which the model must see again."""

    def is_taught_by(self, template: str) -> bool:
        return self.openings[0] in template or "<|im_system|>tool_declare" in template

    def fit(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages with ids as the model writes them.

        Conversations from another server have other ids, and with these the model's answers get worse.
        """
        return with_ids(messages, _kimi_id)


def _kimi_id(call: Message, number: int) -> str:
    call_id = call["id"]
    has_shape = isinstance(call_id, str) and _KIMI_ID.fullmatch(call_id)
    return call_id if has_shape else f"functions.{call['function']['name']}:{number}"


_KIMI_ID = re.compile(r"functions\.[a-zA-Z0-9_.-]+:[0-9]+")
KIMI_K2 = KimiFormat(
    name="kimi_k2",
    openings=("<|tool_calls_section_begin|>",),
    section_end="<|tool_calls_section_end|>",
    call=("<|tool_call_begin|>", "<|tool_call_end|>"),
    inner=("<|tool_call_argument_begin|>",),
    header=rf"\s*(?P<id>(?:functions\.)?{_NAME}(?::[0-9]+)?)\s*<\|tool_call_argument_begin\|>\s*",
    written=("functions.{name}:", _NUMBER, "<|tool_call_argument_begin|>"),
    has_ids=True,
    ends_thoughts=True,
)
_INTRODUCTION = """You can call these functions, each described by a line of JSON:
{{tools}}
To call some, end your answer with all calls, each with its name and its arguments as JSON, like this:
<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>
The results then come between <｜tool▁output▁begin｜> and <｜tool▁output▁end｜>. Where no function helps, answer in words."""
DEEPSEEK_V3 = SectionFormat(
    name="deepseek_v3",
    signs=("<｜tool▁calls▁begin｜>", "```json"),
    openings=("<｜tool▁calls▁begin｜>",),
    section_end="<｜tool▁calls▁end｜>",
    call=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    inner=("<｜tool▁sep｜>",),
    header=rf"\s*(?:function\s*)?<｜tool▁sep｜>\s*{_NAME}\s*(?:```(?:json)?\s*)?",
    written=("function", "<｜tool▁sep｜>", "{name}\n```json\n"),
    after="\n```",
    between="\n",
    introduction=_INTRODUCTION.format(
        call='<｜tool▁call▁begin｜>function<｜tool▁sep｜>name_of_function\n```json\n{{"argument": "value"}}\n```<｜tool▁call▁end｜>'
    ),
)
DEEPSEEK_V31 = replace(
    DEEPSEEK_V3,
    name="deepseek_v31",
    signs=("<｜tool▁calls▁begin｜>",),
    header=rf"\s*{_NAME}\s*<｜tool▁sep｜>\s*",
    written=("{name}", "<｜tool▁sep｜>"),
    after="",
    between="",
    introduction=_INTRODUCTION.format(
        call='<｜tool▁call▁begin｜>name_of_function<｜tool▁sep｜>{{"argument": "value"}}<｜tool▁call▁end｜>'
    ),
)


class SectionParser(ArgumentsParser):
    """`push` text, `finish` at its end."""

    def __init__(self, tool_format: SectionFormat, tools: Tools) -> None:
        super().__init__((*tool_format.openings, tool_format.call[0]))
        self._format = tool_format
        self._tools = tools
        self._header_regex = re.compile(tool_format.header)
        self._ids: set[str] = set()
        self._fence = ""  # the text that may follow the arguments directly

    def _closings(self) -> tuple[str, ...]:
        return (self._format.call[1], self._format.section_end)

    def _is_part_of_mark(self, text: str) -> bool:
        marks = (*self._closings(), self._format.call[0], self._fence)
        return any(mark.startswith(text) for mark in marks)

    def _opened(self, mark: str) -> None:
        self._step = self._header if mark == self._format.call[0] else self._first

    def _first(self) -> bool:
        """Read the mark of the first call."""
        self._skip_space()
        return self._next_call() or (not self._format.call[0].startswith(self._buffer) and self._no_call())

    def _next_call(self) -> bool:
        mark = self._format.call[0]
        if not self._buffer.startswith(mark):
            return False
        self._hold(len(mark))
        self._step = self._header
        return True

    def _header(self) -> bool:
        """Read a call up to its arguments, or up to its end if it has none."""
        ends = ("{", *self._closings())
        found = min((at for end in ends if (at := self._buffer.find(end)) >= 0), default=-1)
        if found < 0 and len(self._buffer) <= _MAX_HEADER + max(map(len, ends)):
            return False
        header = self._header_regex.fullmatch(self._buffer, 0, found) if 0 <= found <= _MAX_HEADER else None
        if header is None or not self._is_known(header):
            return self._no_call()
        self._begin(header["name"], self._new_id(header))
        self._buffer = self._buffer[found:]
        self._scanner, self._step = JsonScanner(), self._read_arguments
        if not self._buffer.startswith("{"):
            self._arguments("{}")
            self._end_arguments()
        return True

    def _is_known(self, header: re.Match[str]) -> bool:
        """Return True if a header names a call; without a number it must name one of the tools."""
        return not self._format.has_ids or ":" in header["id"] or header["name"] in self._tools

    def _new_id(self, header: re.Match[str]) -> str:
        """Return the id that the model gave a call, once."""
        call_id = header["id"] if self._format.has_ids else ""
        if call_id in self._ids:
            return ""
        self._ids.add(call_id)
        return call_id

    def _end_arguments(self) -> None:
        self._fence = self._format.after.strip()
        super()._end_arguments()

    def _broken(self) -> bool:
        has_ended = super()._broken()
        if has_ended:
            self._step = self._after
        return has_ended

    def _after(self) -> bool:
        """Read the text after a call: its end, another call, the end of the section, or content."""
        self._skip_space()
        for mark in (self._fence, *self._closings()):
            if mark and self._buffer.startswith(mark):
                self._held, self._buffer = "", self._buffer[len(mark) :]
                self._fence = ""
                if mark == self._format.section_end:
                    self._step = self._text
                return True
        return self._next_call() or (not self._is_part_of_mark(self._buffer) and self._no_call())
