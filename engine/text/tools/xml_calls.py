"""Tool calls in XML, as Qwen3-Coder writes them: format, parser and grammar.

    <tool_call>
    <function=name>
    <parameter=name>
    value
    </parameter>
    </function>
    </tool_call>

Parameters become the members of a JSON object, strings piece by piece. As in json_calls.py the result does not depend
on how the text was cut, text that is not a call is content, unchanged, and nothing raises. The tags around a function may
be missing, and so may the end of a parameter or of the function, which models forget. One parser for each choice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.core.errors import InvalidRequestError
from engine.text.grammars.spec import close_schema
from engine.text.piece_parser import first_of, held_back
from engine.text.tools.base import SPACE, CallParser, OfferedTool, ToolFormat, Tools, any_of, embedded, literal
from engine.text.tools.schema_types import STRING, json_of, resolved, type_name, types_at, types_of, values_at
from engine.text.types import Piece

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
_NAME = re.compile(r"([a-zA-Z0-9_.-]{1,64})>")
_PART_OF_NAME = re.compile(r"[a-zA-Z0-9_.-]{0,64}")
_PARAMETER_NAME = re.compile(r"[^\n<>]{1,256}")
_PARAMETER = re.compile(f"{PARAMETER}({_PARAMETER_NAME.pattern})>(\n|(?=.))")  # a line break is no part of the value
_PART_OF_PARAMETER = re.compile(PARAMETER + r"[^\n<>]{0,256}>?")


class XmlFormat(ToolFormat):
    """Calls whose names and parameters are tags."""

    @property
    def markup(self) -> frozenset[str]:
        """The texts around calls; those that are special tokens are shown to the parser."""
        return frozenset((OPENING, CLOSING))

    def parser(self, tools: Tools) -> CallParser:
        """Return a parser of one answer that may call these tools."""
        return XmlCallParser(tools)

    def grammar(self, tools: Sequence[OfferedTool], special_tokens: Mapping[str, int], *, parallel: bool) -> str:
        """Return Lark for free text with calls in it. Raises InvalidRequestError."""
        return _grammar(tools, special_tokens, parallel=parallel)


QWEN3_XML = XmlFormat(name="qwen3_xml", signs=(OPENING, FUNCTION))


class XmlCallParser(CallParser):
    """`push` text, `finish` at its end. `tools` has the schemas of parameters."""

    def __init__(self, tools: Tools) -> None:
        super().__init__((OPENING, FUNCTION))
        self._closing = CLOSING
        self._tools = tools
        self._is_tagged = False  # the function is between tags
        self._parameters: Mapping[str, Any] = {}  # the schema of the call at hand
        self._given: set[str] = set()  # the names of its parameters so far
        self._types: frozenset[str] | None = None  # of the parameter at hand; None for a repeated one, which is skipped
        self._whole = ""  # the value so far, where its JSON is not known before its end

    def finish(self) -> list[Piece]:
        """Return what was held back. Ends the text."""
        rest = self._buffer
        if self._step == self._value and self._types is not None:
            self._arguments(_escaped(rest) if self._types == STRING else self._whole + rest)
            rest = ""
        elif self._step in (self._members, self._value):
            is_cut = END_FUNCTION.startswith(rest) or CLOSING.startswith(rest) or _begins_parameter(rest)
            if is_cut or self._step == self._value:
                rest = ""
            self._end_call()
        self._buffer = rest
        return super().finish()

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
        name = match[1]
        if not self._is_tagged and name not in self._tools:
            return self._no_call()
        self._begin(name)
        self._buffer = self._buffer[match.end() :]
        self._parameters, self._given = self._tools.get(name, {}), set()
        self._step = self._members
        return True

    def _members(self) -> bool:
        """Read the next parameter, or the end of the function."""
        self._buffer = buffer = self._buffer.lstrip()
        if match := _PARAMETER.match(buffer):
            self._buffer = buffer[match.end() :]
            self._begin_parameter(match[1])
            return True
        if buffer.startswith(END_FUNCTION):
            self._buffer = buffer[len(END_FUNCTION) :]
        elif END_FUNCTION.startswith(buffer) or _begins_parameter(buffer):
            return False
        self._end_call()
        return True

    def _begin_parameter(self, name: str) -> None:
        """Begin a value; a repeated one is skipped, because the first may have been sent."""
        self._step, self._types, self._whole = self._value, None, ""
        if name not in self._given:
            self._types = types_of(self._parameters, name)
            quote = '"' if self._types == STRING else ""
            begin = "{" if not self._given else ", "
            self._arguments(f"{begin}{json.dumps(name, ensure_ascii=False)}: {quote}")
            self._given.add(name)

    def _value(self) -> bool:
        """Read more of a value, or its end."""
        buffer = self._buffer
        at, end = first_of(buffer, _ENDS) or (len(buffer) - held_back(buffer, tuple(_ENDS)), "")
        text, self._buffer = buffer[:at], buffer[at + _ENDS.get(end, 0) :]
        if end:
            self._step = self._members
        if self._types == STRING:
            self._arguments(_escaped(text) + ('"' if end else ""))
        elif self._types is not None:
            self._whole += text
            self._arguments(json_of(self._whole, self._types) if end else "")
        return bool(end)

    def _end_call(self) -> None:
        self._arguments("}" if self._given else "{}")
        self._step = self._after


def _begins_parameter(text: str) -> bool:
    """Return True if more text may complete the tag of a parameter."""
    return PARAMETER.startswith(text) or _PART_OF_PARAMETER.fullmatch(text) is not None


def _escaped(text: str) -> str:
    """Return a text as it is written between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


# -- grammar -----------------------------------------------------------------------------------------------------------
# Parameters come in the schema's order. A string is the text before its end mark, so a keyword that restricts a string,
# other than to a list of values, cannot be enforced and is refused.

_ENDS_OF_STRING = "|".join(
    mark.replace("/", "\\/") for mark in (END_PARAMETER, "\\n" + PARAMETER, "\\n" + END_FUNCTION)
)
_UNENFORCED = (
    "pattern", "format", "minLength", "maxLength", "contentEncoding", "contentMediaType", "allOf", "not", "if",
)  # fmt: skip
_RESTRICTING = ("type", "enum", "const", "$ref", "anyOf", "oneOf", *_UNENFORCED)  # others do not restrict a string
_MAX_PARTS = 1024  # of a string's alternatives: a few references can make billions


def _grammar(tools: Sequence[OfferedTool], special_tokens: Mapping[str, int], *, parallel: bool) -> str:
    """Return Lark for text with calls in it. Raises InvalidRequestError."""
    is_token, space = OPENING in special_tokens, f"/{SPACE}/"
    lines = [
        f"start: (tagged | bare){'*' if parallel else '?'} TEXT",
        "TEXT: /(?s:.*)/",
        f"opened{'' if is_token else '[lazy]'}: TEXT {literal(OPENING, special_tokens)}",
        f"function[lazy]: TEXT {json.dumps(FUNCTION)}",
        f"end: {space} {literal(CLOSING, special_tokens)}",
        f"tagged: opened {space} {json.dumps(FUNCTION)} call end",
        "bare: function call end",
        f'free: ({space} "{PARAMETER}" /[^\\n<>]{{1,256}}/ ">\\n" string)* {space} "{END_FUNCTION}"',
        f"STRING: /(?s:.*)/ & ~/(?s:.*)({_ENDS_OF_STRING})(?s:.*)/",
        f'string[lazy]: STRING "\\n{END_PARAMETER}"',
        f"call: {any_of('call', len(tools))}",
    ]
    for index, tool in enumerate(tools):
        if not tool.strict:
            lines.append(f'call_{index}: "{tool.name}>" free')
            continue
        parameters = close_schema(tool.parameters)
        required = parameters.get("required", [])
        members = []
        for place, (name, schema) in enumerate(parameters.get("properties", {}).items()):
            rule = f"parameter_{index}_{place}"
            members.append(f"({space} {rule})" + ("" if name in required else "?"))
            lines.append(f"{rule}: {json.dumps(f'{PARAMETER}{name}>')} {_value(name, schema, parameters)}")
        lines.append(f'call_{index}: "{tool.name}>" {" ".join(members)} {space} "{END_FUNCTION}"')
    return "\n".join(lines)


def _value(name: str, schema: Any, parameters: Mapping[str, Any]) -> str:
    """Return Lark for a value between two line breaks, and its end mark."""
    if not _PARAMETER_NAME.fullmatch(name):
        raise _refusal(f"a parameter cannot be named {name!r}", "rename it")
    types, end = types_of(parameters, name), json.dumps("\n" + END_PARAMETER)
    if "string" not in types:
        shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
        whole = {**shared, **schema} if isinstance(schema, Mapping) else shared
        return f'"\\n" {embedded(whole, lenient=False)} {end}'
    if types - {"string", "null"}:
        why = f"the string {name!r} cannot be told from {' or '.join(sorted(types - {'string'}))}"
        raise _refusal(why, "give it one type")
    texts = _texts(name, schema, parameters)
    if texts is None:
        return '"\\n" string'
    if not texts:
        raise _refusal(f"the string {name!r} must have a value, and its schema leaves none", "mend its enum or const")
    written = " | ".join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(texts))
    return f'"\\n" ({written}) {end}'


def _refusal(why: str, instead: str) -> InvalidRequestError:
    message = f"tools cannot be used: this model writes calls in a way in which {why}; {instead}, or leave out strict."
    return InvalidRequestError(message, param="tools")


def _texts(name: str, schema: Any, parameters: Mapping[str, Any]) -> list[str] | None:
    """Return the texts that a string may be, null as a word; None for any text."""
    texts: list[str] = []
    is_any = False
    parts = [schema]
    for part in parts:  # alternatives are appended meanwhile
        if len(parts) > _MAX_PARTS:
            raise _refusal(f"the string {name!r} may have at most {_MAX_PARTS} alternatives", "name fewer")
        part = part if isinstance(part, Mapping) else {}
        key, alternatives = next(_alternatives(part, parameters), ("", []))
        beside = [each for each in _RESTRICTING if each in part and each != key]
        if key and beside:
            why = f"{beside[0]} of the string {name!r} cannot stand beside {key}"
            raise _refusal(why, "move it into the alternatives")
        wrong = next((each for each in beside if each in _UNENFORCED), None)
        if wrong is not None:
            raise _refusal(f"{wrong} of the string {name!r} cannot be enforced", "leave it out")
        parts += alternatives
        types, values = types_at(part), values_at(part)
        if values is None:
            is_any = is_any or not (key or types == {"null"})
            values = [None] if types == {"null"} else []
        fitting = [value for value in values if not types or type_name(value) in types]
        texts += ["null" if value is None else value for value in fitting if value is None or isinstance(value, str)]
    return None if is_any else texts


def _alternatives(schema: Mapping[str, Any], parameters: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield each keyword of a schema that names alternatives, with them."""
    if isinstance(schema.get("$ref"), str):
        yield "$ref", [resolved(schema["$ref"], parameters)]
    for key in ("anyOf", "oneOf", "allOf"):
        inner = schema.get(key)
        if isinstance(inner, list) and (key != "allOf" or len(inner) == 1):
            yield key, inner
