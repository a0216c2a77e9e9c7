"""Tool calls as Gemma 4 writes them: format, parser and grammar.

    <|tool_call>call:name{key:<|"|>text<|"|>,other:[1,true],third:{inner:null}}<tool_call|>

Keys are bare, and a string is between two equal marks, without escapes. Arguments are translated into JSON as they arrive.
As in json_calls.py the result does not depend on how the text was cut, text that is not a call is content, unchanged, a
fault within arguments stays in them, and nothing raises. One parser for each choice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from engine.text.tools.json_arguments import ArgumentsParser
from engine.text.tools.python_literals import LiteralReader
from engine.text.tools.text_values import types_of
from engine.text.tools.tool_format import (
    CallParser,
    OfferedTool,
    ToolFormat,
    Tools,
    any_of,
    embedded,
    free_text,
    literal,
)
from engine.text.tools.value_grammar import Parameter, ValueGrammar, arguments_in_order, self_contained
from engine.text.types import Piece, held_back

OPENING, CLOSING, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_HEAD = re.compile(r"\s{0,20}call:\s{0,20}([a-zA-Z0-9_.-]{1,128})\s{0,20}(?=\{)")
_PART_OF_HEAD = re.compile(r"\s{0,20}(?:c(?:a(?:l(?:l(?::\s{0,20}(?:[a-zA-Z0-9_.-]{1,128}\s{0,20})?)?)?)?)?)?")
_KEY = r'[^\s:{}\[\],"\'<>]{1,256}'
_KEY_BEFORE = re.compile(rf"({_KEY})(?=\s{{0,20}}:)")
_PART_OF_KEY = re.compile(rf"{_KEY}\s{{0,20}}")


class GemmaFormat(ToolFormat):
    """Calls whose keys are bare, and whose strings have marks of their own."""

    def parser(self, tools: Tools) -> CallParser:  # noqa: ARG002 - the types are in the text
        return GemmaCallParser()

    def grammar(self, tools: Sequence[OfferedTool], special_tokens: Mapping[str, int], *, parallel: bool) -> str:
        lines = free_text(OPENING, special_tokens, parallel=parallel)
        return "\n".join([*lines, *_calls("calls", tools, special_tokens, is_forced=False)])

    def forced(self, tools: Sequence[OfferedTool], special_tokens: Mapping[str, int], *, max_calls: int) -> list[str]:
        one = f"one: {literal(OPENING, special_tokens)} call"
        return [f"calls: one{{1,{max_calls}}}", one, *_calls("call", tools, special_tokens, is_forced=True)]


GEMMA4 = GemmaFormat(
    name="gemma4", signs=(OPENING, CLOSING, QUOTE), openings=(OPENING,), inner=(CLOSING, QUOTE), ends_thoughts=True
)


class _Reader(LiteralReader):
    """A literal with bare keys, and strings between marks; other strings are read, too."""

    def _item(self, text: str, at: int, is_last: bool) -> tuple[str, int]:
        if text.startswith(QUOTE, at):
            comma = "" if self._is_first or self._is_half() else ", "
            self._quote, self._is_key = QUOTE, self._expects == "key"
            return comma + '"', len(QUOTE)
        if QUOTE.startswith(text[at:]) and not is_last:
            return "", 0
        if self._expects == "key" and text[at] not in "\"'":
            return self._bare_key(text, at, is_last)
        return super()._item(text, at, is_last)

    def _bare_key(self, text: str, at: int, is_last: bool) -> tuple[str, int]:
        found = _KEY_BEFORE.match(text, at)
        if found is None:
            return ("", 0) if _PART_OF_KEY.fullmatch(text, at) and not is_last else self._fault()
        comma = "" if self._is_first else ", "
        self._is_key = True
        self._end_item()
        return comma + json.dumps(found[1], ensure_ascii=False), found.end() - at

    def _string(self, text: str, at: int, is_last: bool) -> tuple[str, int]:
        if self._quote != QUOTE:
            return super()._string(text, at, is_last)
        end = text.find(QUOTE, at)
        if end == at:
            self._quote = ""
            self._end_item()
            return '"', len(QUOTE)
        if end < 0:
            end = len(text) - (0 if is_last else held_back(text[at:], (QUOTE,)))
        return json.dumps(text[at:end], ensure_ascii=False)[1:-1], end - at


class GemmaCallParser(ArgumentsParser):
    """`push` text, `finish` at its end."""

    def __init__(self) -> None:
        super().__init__((OPENING,))
        self._closing = CLOSING

    def finish(self) -> list[Piece]:
        if self._step == self._read_arguments:
            self._buffer = ""  # a part of a mark, key or word
        return super().finish()

    def _opened(self, mark: str) -> None:  # noqa: ARG002 - there is one
        self._step = self._head

    def _head(self) -> bool:
        """Read the name of a call."""
        head = _HEAD.match(self._buffer)
        if head is None:
            return not _PART_OF_HEAD.fullmatch(self._buffer) and self._no_call()
        self._begin(head[1])
        self._buffer = self._buffer[head.end() :]
        self._scanner, self._step = _Reader(), self._read_arguments
        return True


def _calls(rule: str, tools: Sequence[OfferedTool], special_tokens: Mapping[str, int], *, is_forced: bool) -> list[str]:
    """Return Lark whose `rule` is a call after its opening mark, up to its end.

    Strings inside lists and objects are JSON's, which the parser reads as well.
    """
    values, quote = ValueGrammar("", "", QUOTE, ("<tool_call\\|>",), special_tokens), literal(QUOTE, special_tokens)
    lines = [
        f"{rule}: ({any_of('call', len(tools))}) {literal(CLOSING, special_tokens)}",
        'free: (pair ("," pair)*)? "}"',
        "pair: /[a-zA-Z_][a-zA-Z0-9_.-]{0,127}:/ item",
        f'item: ITEM | {quote} string | "[" (item ("," item)*)? "]" | "{{" (pair ("," pair)*)? "}}"',
        "ITEM: /true|false|null|-?[0-9]{1,18}(\\.[0-9]{1,18})?([eE][-+]?[0-9]{1,2})?/",
        *values.lines(),
    ]

    def written(each: Parameter, tool: OfferedTool) -> str:
        if "string" in types_of(tool.parameters, each.name):
            value = f"{quote} {values.value(each.name, each.schema, tool)}"
        else:
            value = embedded(self_contained(each.name, each.schema, tool.parameters), lenient=not tool.strict)
        return f"{json.dumps(each.name + ':')} {value}"

    for index, tool in enumerate(tools):
        lines.append(f"call_{index}: {json.dumps(f'call:{tool.name}{{')} arguments_{index}")
        lines += arguments_in_order(tool, index, re.compile(_KEY), written, between=",", end="}", is_forced=is_forced)
    return lines
