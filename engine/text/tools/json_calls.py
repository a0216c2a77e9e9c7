"""Tool calls in JSON, behind a mark or alone: formats, parser and grammar.

    {"name": ..., "arguments": {...}}        or arguments alone, after a name

The parser's result does not depend on how the text was cut, and nothing is lost but the markup of calls: text that turns
out not to be a call is content, unchanged, and a fault within arguments stays in them. Arguments behind a name are passed
on as they arrive; a call in another order once it is whole. Never raises. One parser for each choice. Forced calls without a
format of the model's are a list of such objects.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.core.errors import InvalidRequestError
from engine.text.grammars.spec import MAX_TEXT, GrammarSpec
from engine.text.tools.json_arguments import ArgumentsParser, JsonScanner
from engine.text.tools.tool_format import (
    MAX_CALLS,
    SPACE,
    SPACING,
    Message,
    OfferedTool,
    ToolFormat,
    Tools,
    any_of,
    embedded,
    literal,
    repeated,
    with_ids,
)

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_ID = re.compile(r"[a-zA-Z0-9]{0,64}")
_STRING = r'"(?:[^"\\]|\\.)*"'
_GAP = r"[ \t\r\n]*"
_MEMBER = rf"{_STRING}{_GAP}:{_GAP}(?:{_STRING}|[-+.a-zA-Z0-9]+){_GAP},{_GAP}"
_HEAD = re.compile(  # of a call: its name, and perhaps all text before its arguments
    rf'\{{{_GAP}(?:{_MEMBER})*?"name"{_GAP}:{_GAP}"(?P<name>{_NAME.pattern})"'
    rf'(?P<rest>{_GAP},{_GAP}(?:{_MEMBER})*?"(?:arguments|parameters)"{_GAP}:{_GAP}(?=\{{))?',
    re.DOTALL,
)
_MAX_HEAD = 300  # characters; a longer one is found once its call is whole
_BEGINNING = re.compile(rf'\{{{_GAP}(?:"|$)')
_FENCE = "```"  # stands before other things than calls as well


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JsonFormat(ToolFormat):
    """Calls as JSON objects, one or a list of them."""

    marks: tuple[tuple[str, str], ...] = ()  # the texts before and after calls; the latter may be empty
    is_listed: bool = False  # calls are written as a list after one mark
    is_bare: bool = False  # an answer may also begin with a call without any mark
    only_known: bool = False  # JSON that names none of the request's tools is content, not a call
    leads_with_name: bool = False  # a mark may be followed by name{...} as well
    id_mark: str = ""  # the text that may stand between such a name and the call's id
    name_end: str = ""  # the text that may stand between such a name and its arguments

    @property
    def markup(self) -> frozenset[str]:
        return frozenset(mark for pair in self.marks for mark in pair if mark) | ({self.id_mark, self.name_end} - {""})

    def parser(self, tools: Tools) -> JsonCallParser:
        return JsonCallParser(self, frozenset(tools))

    def grammar(self, tools: Sequence[OfferedTool], special_tokens: Mapping[str, int], *, parallel: bool) -> str:
        return _grammar(self, tools, special_tokens, parallel=parallel)

    def forced(
        self, tools: Sequence[OfferedTool], special_tokens: Mapping[str, int], *, max_calls: int
    ) -> list[str] | None:
        if not self.marks or self.is_bare or self.leads_with_name:
            return None
        opening, closing = (literal(mark, special_tokens) if mark else "" for mark in self.marks[0])
        if self.is_listed:
            lines = [f'calls: {opening} "[" {repeated("call", ", ", max_calls - 1)} "]" {closing}']
        elif closing:
            lines = [
                f"calls: {repeated('one', chr(10), max_calls - 1)}",
                f"one: {opening} NEWLINE call NEWLINE {closing}",
                'NEWLINE: "\\n"',
            ]
        else:
            lines = [f"calls: {repeated('one', chr(10), max_calls - 1)}", f'one: {opening} " " call']
        return lines + forced_objects(tools)

    def fit(self, messages: Sequence[Message]) -> Sequence[Message]:
        return with_ids(messages, self._own_id) if self.id_length else messages

    def _own_id(self, call: Message, number: int) -> str:
        """Return an id of the length that the templates insist on."""
        call_id = call["id"] or str(number)
        has_length = len(call_id) == self.id_length and call_id.isascii() and call_id.isalnum()
        return call_id if has_length else hashlib.sha256(call_id.encode()).hexdigest()[: self.id_length]

    @property
    def spells_calls(self) -> bool:
        return bool(self.marks) and not self.is_bare

    def spelled(self, calls: Sequence[Message]) -> str:
        functions = [call["function"] for call in calls]
        named = [{"name": function["name"], "arguments": function["arguments"]} for function in functions]
        written = [json.dumps(call, ensure_ascii=False) for call in named]
        opening, closing = self.marks[0]
        if self.is_listed:
            return f"{opening}[{', '.join(written)}]{closing}"
        return "\n".join(f"{opening}\n{call}\n{closing}" if closing else f"{opening} {call}" for call in written)


def forced_objects(tools: Sequence[OfferedTool]) -> list[str]:
    """Return Lark whose rule `call` is a call of one of the tools as a JSON object."""
    lines = [f"call: {any_of('call', len(tools))}"]
    for index, tool in enumerate(tools):
        head = json.dumps(f'{{"name": "{tool.name}", "arguments": ')
        lines += [f'call_{index}: {head} arguments_{index} "}}"', f"arguments_{index}: {tool.arguments(SPACING)}"]
    return lines


HERMES = JsonFormat(
    name="hermes", aliases=("qwen3_json", "granite4"), signs=("<tool_call>",), marks=(("<tool_call>", "</tool_call>"),)
)
GRANITE = JsonFormat(
    name="granite",  # 3.x; 4 writes as Hermes does
    signs=("<|tool_call|>", "<|start_of_role|>"),
    marks=(("<|tool_call|>", ""), ("<tool_call>", "")),
    is_listed=True,
)
NEMOTRON = JsonFormat(
    name="nemotron_json",  # Nemotron Nano 2; 3 writes as Qwen3-Coder does
    signs=("<TOOLCALL>",),
    marks=(("<TOOLCALL>", "</TOOLCALL>"),),
    is_listed=True,
)
GRANITE_FC = JsonFormat(name="granite-20b-fc", signs=("<function_call>",), marks=(("<function_call>", ""),))
LLAMA4 = JsonFormat(
    name="llama4_json",
    signs=("<|header_start|>", '"parameters"'),
    marks=(("<|python_start|>", "<|python_end|>"), ("<|python_tag|>", "")),
    is_bare=True,
    only_known=True,
)
LLAMA3 = JsonFormat(
    name="llama3_json",
    signs=("<|start_header_id|>", '"parameters"'),
    marks=(("<|python_tag|>", ""),),
    is_bare=True,
    only_known=True,
)
MISTRAL = JsonFormat(
    name="mistral",
    signs=("[TOOL_CALLS]",),
    marks=(("[TOOL_CALLS]", ""),),
    leads_with_name=True,
    id_mark="[CALL_ID]",
    name_end="[ARGS]",
    id_length=9,  # its templates refuse others
)
JSON = JsonFormat(
    name="json",
    aliases=("phi4_mini_json",),
    signs=("<|tool_call|>",),
    marks=(("```json", "```"), ("<|tool_call|>", "<|/tool_call|>")),
    is_bare=True,
    only_known=True,
)
FORCED = JsonFormat(name="forced", is_bare=True, only_known=True)  # what a grammar of forced calls lets a model write


class JsonCallParser(ArgumentsParser):
    """`push` text, `finish` at its end. `names` are the request's tools."""

    def __init__(self, tool_format: JsonFormat, names: frozenset[str]) -> None:
        super().__init__(tuple(opening for opening, _ in tool_format.marks))
        self._format = tool_format
        self._names = names
        self._in_list = False
        self._num_scanned = 0  # characters of the buffer, while it may be a call
        self._is_wrapped = False  # the arguments are part of an object

    def _accepts(self, name: str) -> bool:
        return name in self._names if self._format.only_known else bool(_NAME.fullmatch(name))

    def _text(self) -> bool:
        words = self._buffer.lstrip()
        if self._is_fresh and self._format.is_bare and words[:1] in ("{", "["):
            self._skip_space()
            self._opened("")
            return True
        return super()._text()

    def _opened(self, mark: str) -> None:
        self._closing = dict(self._format.marks).get(mark, "")
        self._in_list = self._is_fresh = False
        self._step = self._payload

    def _payload(self) -> bool:
        """Read the beginning of a call, after a mark or between two calls of a list."""
        first = self._skip_space()
        if not first:
            return False
        if first == "{":
            self._scanner, self._num_scanned = JsonScanner(), 0
            self._step = self._call
        elif first == "[" and not self._in_list:
            self._in_list = True
            self._hold(1)
        elif self._format.leads_with_name and not self._in_list:
            self._step = self._name
        else:
            return self._no_call()
        return True

    def _name(self) -> bool:
        """Read a name that is followed by its arguments."""
        match, before_id, end = _NAME.match(self._buffer), self._format.id_mark, self._format.name_end
        if match is None:
            return self._no_call()
        rest = self._buffer[match.end() :].lstrip()
        call_id = ""
        if before_id and rest.startswith(before_id):
            call_id = _ID.match(rest, len(before_id))[0]  # type: ignore[index]  # perhaps empty
            rest = rest[len(before_id) + len(call_id) :].lstrip()
        elif before_id.startswith(rest):
            return False
        if end and rest.startswith(end):
            rest = rest[len(end) :].lstrip()
        elif end.startswith(rest):
            return False
        if not rest:
            return False
        if not rest.startswith("{"):
            return self._no_call()
        return self._begin_call(match.group(), rest, call_id)

    def _call(self) -> bool:
        """Read the beginning of an object, until it is certain to be a call or not."""
        head = _HEAD.match(self._buffer, 0, _MAX_HEAD) if self._num_scanned < _MAX_HEAD else None
        if (head and not self._accepts(head["name"])) or not _BEGINNING.match(self._buffer):
            return self._no_call()
        if head and head["rest"]:
            return self._begin_call(head["name"], self._buffer[head.end() :], is_wrapped=True)
        rest = self._scanner.read(self._buffer[self._num_scanned :])[1]
        self._num_scanned = len(self._buffer) - len(rest)
        if not self._scanner.is_done:
            return self._scanner.is_faulty and self._no_call()
        name, arguments = _whole_call(self._buffer[: self._num_scanned])
        if not self._accepts(name):
            return self._no_call()
        self._begin(name)
        self._arguments(arguments)
        self._buffer, self._step = rest, self._after
        return True

    def _begin_call(self, name: str, rest: str, call_id: str = "", *, is_wrapped: bool = False) -> bool:
        self._begin(name, call_id)
        self._buffer, self._is_wrapped = rest, is_wrapped
        self._scanner, self._step = JsonScanner(), self._read_arguments
        return True

    def _end_arguments(self) -> None:
        self._scanner = JsonScanner(is_open=True)
        self._step = self._rest_of_call if self._is_wrapped else self._after

    def _rest_of_call(self) -> bool:
        """Skip what follows the arguments within the object of a call."""
        self._buffer = self._scanner.read(self._buffer)[1]
        if self._scanner.is_done or self._scanner.is_faulty:
            self._step = self._after
        return True

    def _after(self) -> bool:
        """Read the text after a call: an end mark, another call, or content."""
        first = self._skip_space()
        if self._in_list and first == "]":
            self._in_list = False
            self._held, self._buffer = "", self._buffer[1:]
            return True
        if first and first in ",;" and (self._in_list or self._format.is_bare):
            self._hold(1)
            self._step = self._payload
            return True
        return self._no_call() if first and self._in_list else super()._after()


def _whole_call(text: str) -> tuple[str, str]:
    """Return a call's name and arguments; no name for another object."""
    try:
        call: dict[str, Any] = json.loads(text, strict=False)
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):  # models also write a string, or null
            written = arguments.strip() or "{}"
        else:
            written = json.dumps({} if arguments is None else arguments, ensure_ascii=False, allow_nan=False)
        written.encode()  # halves of a surrogate pair cannot be sent
    except (ValueError, RecursionError):
        return "", ""
    return (name, written) if isinstance(name, str) and written.startswith("{") else ("", "")


# -- grammar -----------------------------------------------------------------------------------------------------------


def _grammar(
    tool_format: JsonFormat, tools: Sequence[OfferedTool], special_tokens: Mapping[str, int], *, parallel: bool
) -> str:
    """Return Lark for free text with calls in it.

    Free text ends at a mark, and calls follow it. Where there may be no mark, the tool's name distinguishes a call from
    other JSON: an answer that begins as JSON cannot name a tool except to call it.
    """
    marks = [mark for mark in tool_format.marks if not mark[0].startswith(_FENCE)]
    is_bare = tool_format.is_bare
    lines = [f"start: ({any_of('tag', len(marks))}){'*' if parallel else '?'} TEXT" + (" | bare" if is_bare else "")]
    lines.append("TEXT: /(?s:.*)/" + (f" & ~{_bare_head(tools)}" if is_bare else ""))
    for index, mark in enumerate(marks):
        lines += _tag(index, mark, special_tokens)
    more = f"(/{SPACE}[,;]{SPACE}/ call){{0,{MAX_CALLS - 1}}}" if is_bare and parallel else ""
    in_list = (f"(/{SPACE},{SPACE}/ call){{0,{MAX_CALLS - 1}}} " if parallel else "") + f"/{SPACE}\\]/"
    lines.append(f'calls: call {more} | "[" /{SPACE}/ call {in_list}')
    lines += [f"{rule}: {any_of(rule, len(tools))}" for rule in ("call", *(("single", "listed") if is_bare else ()))]
    if is_bare:
        lines.append(f"bare: single {more} | listed {in_list}")
    for index, tool in enumerate(tools):
        rest = f"arguments_{index} /{SPACE}\\}}/"
        lines.append(f"arguments_{index}: {tool.free_arguments()}")
        lines.append(f"call_{index}: /{_head(tool.name)}/ {rest}")
        if tool_format.leads_with_name:
            between = f"({literal(tool_format.name_end, special_tokens)})?" if tool_format.name_end else ""
            if tool_format.id_mark:
                between = f"({literal(tool_format.id_mark, special_tokens)} /[a-zA-Z0-9]{{1,64}}/)? {between}"
            lines[-1] += f' | "{tool.name}" {between} /{SPACE}/ arguments_{index}'
        if is_bare:  # everything that could still be text must be one lexeme
            lines.append(f"single_{index}: /{SPACE}{_head(tool.name)}/ {rest}")
            lines.append(f"listed_{index}: /{SPACE}\\[{SPACE}{_head(tool.name)}/ {rest}")
    return "\n".join(lines)


def _tag(index: int, mark: tuple[str, str], special_tokens: Mapping[str, int]) -> list[str]:
    """Return the rules for text that ends with a mark, and for the calls after it."""
    opening, closing = mark
    end = f"/{SPACE}/ {literal(closing, special_tokens)}" if closing else ""
    if opening in special_tokens:
        return [f"tag_{index}: TEXT {literal(opening, special_tokens)} /{SPACE}/ calls {end}"]
    return [f"begin_{index}[lazy]: TEXT {json.dumps(opening)}", f"tag_{index}: begin_{index} /{SPACE}/ calls {end}"]


def _head(name: str) -> str:
    """Return a regex of the text before a call's arguments."""
    kind = rf'("type"{SPACE}:{SPACE}"function"{SPACE},{SPACE})?'
    named = rf'"name"{SPACE}:{SPACE}"{name}"{SPACE},{SPACE}'
    return rf'\{{{SPACE}{kind}{named}"(arguments|parameters)"{SPACE}:{SPACE}'


def _bare_head(tools: Sequence[OfferedTool]) -> str:
    """Return a regex of text that begins as JSON and names a tool."""
    names = "|".join(tool.name for tool in tools)
    return rf'/\s*\[?\s*\{{(?s:.*)"name"\s*:\s*"({names})"(?s:.*)/'


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
