"""Finds tool calls in XML, as Qwen3-Coder writes them, in unfinished text.

    <tool_call>
    <function=name>
    <parameter=name>
    value
    </parameter>
    </function>
    </tool_call>

Parameters become the members of a JSON object, strings piece by piece. As in json_parser.py the result does not depend
on how the text was cut, text that is not a call is content, unchanged, and nothing raises. The tags around a function may
be missing, and so may the end of a parameter or of the function, which models forget. One parser for each choice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from engine.text.piece_parser import PieceParser, first_of, held_back
from engine.text.types import CallArguments, CallBegin, Content, Piece

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
PARAMETER_NAME = re.compile(r"[^\n<>]{1,256}")
_PARAMETER = re.compile(f"{PARAMETER}({PARAMETER_NAME.pattern})>")
_PART_OF_PARAMETER = re.compile(PARAMETER + r"[^\n<>]{0,256}")

Schema = Mapping[str, Any]


class XmlToolParser(PieceParser):
    """`push` text, `finish` at its end. `tools` has the schemas of parameters."""

    def __init__(self, tools: Mapping[str, Schema]) -> None:
        super().__init__(self._text)
        self._tools = tools
        self._held = ""  # read since the last call or content: markup if a call follows, content if not
        self._is_tagged = False  # the function is between tags
        self._parameters: Schema = {}  # the schema of the call at hand
        self._given: set[str] = set()  # the names of its parameters so far
        self._types: frozenset[str] = frozenset()
        self._value = ""
        self._is_first = True  # nothing of the value has been read
        self._has_called = False

    def finish(self) -> list[Piece]:
        """Return what was held back. Ends the text."""
        rest = self._held + self._buffer
        if self._step in (self._string, self._other):
            rest = self._without_break(rest)
            self._arguments(_escaped(rest) if self._types == STRING else self._value + rest)
        elif self._step == self._members:
            self._end_call()
            is_cut = END_FUNCTION.startswith(rest) or CLOSING.startswith(rest) or _begins_parameter(rest)
            self._content("" if is_cut else rest)
        elif self._step == self._repeated:
            self._end_call()
        elif not (self._has_called and self._is_markup(rest)):
            self._content(rest)
        self._buffer = self._held = ""
        return self._take()

    def _is_markup(self, rest: str) -> bool:
        """Return True if the end of a text with calls is only space or a cut mark."""
        return not rest.strip() or (self._step == self._after and CLOSING.startswith(rest.strip()))

    def _content(self, text: str) -> None:
        if text:
            self._pieces.append(Content(text))

    def _arguments(self, text: str) -> None:
        if self._pieces and isinstance(last := self._pieces[-1], CallArguments):
            self._pieces[-1] = CallArguments(last.text + text)
        elif text:
            self._pieces.append(CallArguments(text))

    def _text(self) -> bool:
        """Read content up to a mark, holding back space, which may belong to the mark."""
        buffer = self._buffer
        found = first_of(buffer, (OPENING, FUNCTION))
        if found is None:
            certain = buffer[: len(buffer) - held_back(buffer, (OPENING, FUNCTION))].rstrip()
            self._content(certain)
            self._buffer = buffer[len(certain) :]
            return False
        at, mark = found
        before = buffer[:at].rstrip()
        self._content(before)
        self._held, self._buffer = buffer[len(before) : at + len(mark)], buffer[at + len(mark) :]
        self._is_tagged = mark == OPENING
        self._step = self._opened if self._is_tagged else self._name
        return True

    def _opened(self) -> bool:
        """Read the beginning of a function after the opening tag."""
        self._skip_space()
        if self._buffer.startswith(FUNCTION):
            self._move(len(FUNCTION))
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
        self._buffer, self._held = self._buffer[match.end() :], ""
        self._parameters, self._given = self._tools.get(name, {}), set()
        self._has_called = True
        self._pieces.append(CallBegin(name))
        self._step = self._members
        return True

    def _members(self) -> bool:
        """Read the next parameter, or the end of the function."""
        self._buffer = buffer = self._buffer.lstrip()
        if match := _PARAMETER.match(buffer):
            name = match[1]
            self._buffer = buffer[match.end() :]
            if name in self._given:
                self._step = self._repeated
                return True
            self._arguments(("{" if not self._given else ", ") + json.dumps(name, ensure_ascii=False) + ": ")
            self._given.add(name)
            self._types, self._value, self._is_first = types_of(self._parameters, name), "", True
            self._step = self._string if self._types == STRING else self._other
            if self._types == STRING:
                self._arguments('"')
            return True
        if buffer.startswith(END_FUNCTION):
            self._buffer = buffer[len(END_FUNCTION) :]
        elif END_FUNCTION.startswith(buffer) or _begins_parameter(buffer):
            return False
        self._end_call()
        return True

    def _string(self) -> bool:
        text, has_ended = self._read_value()
        self._arguments(_escaped(text) + ('"' if has_ended else ""))
        return has_ended

    def _other(self) -> bool:
        text, has_ended = self._read_value()
        self._value += text
        if has_ended:
            self._arguments(json_of(self._value, self._types))
        return has_ended

    def _repeated(self) -> bool:
        """Skip the value of a repeated parameter: the first may have been sent."""
        return self._read_value()[1]

    def _read_value(self) -> tuple[str, bool]:
        """Return more of the value, and whether it has ended."""
        buffer = self._buffer
        found = first_of(buffer, _ENDS)
        if found is None:
            certain = len(buffer) - held_back(buffer, tuple(_ENDS))
            self._buffer = buffer[certain:]
            return self._without_break(buffer[:certain]), False
        at, end = found
        self._buffer = buffer[at + _ENDS[end] :]
        self._step = self._members
        return self._without_break(buffer[:at]), True

    def _without_break(self, text: str) -> str:
        """Return text of a value without the line break before the value."""
        if text and self._is_first:
            self._is_first = False
            return text.removeprefix("\n")
        return text

    def _end_call(self) -> None:
        self._arguments("}" if self._given else "{}")
        self._step = self._after

    def _after(self) -> bool:
        """Read the text after a function: the closing tag, another function, or content."""
        self._skip_space()
        if self._buffer.startswith(CLOSING):
            self._held, self._buffer = "", self._buffer[len(CLOSING) :]
            self._step = self._text
            return True
        return not CLOSING.startswith(self._buffer) and self._no_call()

    def _no_call(self) -> bool:
        """Make content of the held text; space may belong to the next mark."""
        held, self._held = self._held, ""
        self._step = self._text
        if held.strip():
            self._content(held)
        else:
            self._buffer = held + self._buffer
        return True

    def _skip_space(self) -> None:
        self._move(len(self._buffer) - len(self._buffer.lstrip()))

    def _move(self, num_chars: int) -> None:
        self._held, self._buffer = self._held + self._buffer[:num_chars], self._buffer[num_chars:]


def _begins_parameter(text: str) -> bool:
    """Return True if more text may complete the tag of a parameter."""
    return PARAMETER.startswith(text) or _PART_OF_PARAMETER.fullmatch(text) is not None


def _escaped(text: str) -> str:
    """Return a text as it is written between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


# -- values -----------------------------------------------------------------------------------------------------------

_WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's words, which models write
STRING = frozenset({"string"})


def types_of(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the JSON types that a parameter may have; empty if unknown."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return frozenset(_types(schema, parameters))


def json_of(text: str, types: frozenset[str]) -> str:
    """Return a text as JSON: its value, if the types allow it, else a string."""
    if types == STRING:
        return json.dumps(text, ensure_ascii=False)
    stripped = text.strip()
    spelled = _WORDS.get(stripped, stripped)
    found = _type_of_text(spelled)
    fits = found in types or (found == "integer" and "number" in types)
    if found is not None and (fits or "string" not in types):
        return spelled
    return json.dumps(text, ensure_ascii=False)


def types_at(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names at `type`."""
    found = schema.get("type")
    return {one for one in (found if isinstance(found, list) else [found]) if isinstance(one, str)}


def _types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Return the types of all alternatives, following each reference once."""
    found: set[str] = set()
    seen: set[str] = set()
    left = [schema]
    while left:
        schema = left.pop()
        if not isinstance(schema, Mapping):
            continue
        types = types_at(schema)
        if not types and isinstance(schema.get("enum"), list):
            types = {type_name(value) for value in schema["enum"]}
        if not types and "const" in schema:
            types = {type_name(schema["const"])}
        found |= types
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            left.append(resolved(reference, root))
        for key in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(key)
            left += parts if isinstance(parts, list) else ()
    return found


def resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema that a reference names."""
    place: Any = root
    for step in reference.removeprefix("#/").split("/"):
        place = place.get(step) if isinstance(place, Mapping) else None
    return place


def type_name(value: Any) -> str:
    """Return the JSON type of a value."""
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def _type_of_text(text: str) -> str | None:
    """The type of the JSON that a text is; None if it is none."""
    try:
        return type_name(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
