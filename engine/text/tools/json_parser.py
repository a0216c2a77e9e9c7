"""Finds tool calls in JSON in a model's text while it is being written.

The result does not depend on how the text was cut, and nothing is lost but the markup of calls: text that turns out not
to be a call is content, unchanged, and a fault within the arguments of a call that has begun stays in them. Never raises.
One parser for each choice, on the event loop.

    {"name": ..., "arguments": {...}}        or arguments alone, after a name

Text is a call once its name and the opening brace of its arguments have been read. From there on its arguments are passed
on as they arrive.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import Enum, auto

from engine.text.piece_parser import PieceParser, first_of, held_back
from engine.text.tools.formats import ToolFormat
from engine.text.tools.json_reader import JsonReader
from engine.text.types import CallArguments, CallBegin, Content, Piece

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_SEPARATORS = ",;"
_ARGUMENTS = ("arguments", "parameters")


class CallState(Enum):
    """The state of a call that is being read."""

    OPEN = auto()
    DONE = auto()
    FAULTY = auto()  # the last character does not fit and was not read


class CallReader:
    """`feed` characters while OPEN. `accepts` returns whether a name is a tool's."""

    __slots__ = ("_accepts", "_arguments", "_json", "_member", "_name", "has_begun", "is_whole", "pieces", "raw")

    def __init__(self, accepts: Callable[[str], bool]) -> None:
        self._accepts = accepts
        self._json = JsonReader()
        self._name: str | None = None
        self._arguments: str | None = None  # read before the name, or written in another form
        self._member = ""  # the value being read, where it is needed whole
        self.has_begun = False
        self.is_whole = False  # all arguments have been passed on
        self.pieces: list[CallBegin | CallArguments] = []
        self.raw = ""  # the text before the call began

    def feed(self, char: str) -> CallState:
        """Read one character."""
        in_value, in_scalar = self._json.is_in_value, self._json.is_in_scalar
        text = self._json.feed(char)
        if text is None:
            return CallState.FAULTY
        if not self.has_begun:
            self.raw += char
        still_in_value = self._json.is_in_value
        if still_in_value or (in_value and not in_scalar):
            self._take(text, is_first=not in_value)
        is_call = not (in_value and not still_in_value) or self._end_member()
        if is_call and self._json.is_done:
            is_call = self._end_call()
        if not is_call:  # possible only before the call has begun
            self.raw = self.raw[:-1]
            return CallState.FAULTY
        return CallState.DONE if self._json.is_done else CallState.OPEN

    def _take(self, text: str, *, is_first: bool) -> None:
        if is_first:
            self._member = ""
            if self._json.key in _ARGUMENTS and text == "{" and self._name is not None and not self.has_begun:
                self._begin()
        if self.has_begun and not self.is_whole:
            self.pieces.append(CallArguments(text))
        elif not self.has_begun:
            self._member += text

    def _begin(self) -> None:
        assert self._name is not None
        self.has_begun, self.raw = True, ""
        self.pieces.append(CallBegin(self._name))

    def _end_member(self) -> bool:
        """Process the value of a member; return False if this cannot be a call."""
        if self.has_begun:
            self.is_whole = True
            return True
        if self._json.key == "name":
            self._name = json.loads(self._member) if self._member.startswith('"') else None
            return self._name is not None and self._accepts(self._name)
        if self._json.key in _ARGUMENTS:
            self._arguments = _as_object(self._member)
            return self._arguments is not None
        return True

    def _end_call(self) -> bool:
        """Process the end of the object; return False if it is not a call."""
        if self.has_begun:
            return True
        if self._name is None:
            return False
        self._begin()
        self.pieces.append(CallArguments(self._arguments or "{}"))
        self.is_whole = True
        return True


class ArgumentsReader:
    """Reads arguments whose call's name comes before them, like a CallReader."""

    __slots__ = ("_json", "_name", "has_begun", "is_whole", "pieces", "raw")

    def __init__(self, name: str) -> None:
        self._json = JsonReader()
        self._name = name
        self.has_begun = self.is_whole = False
        self.pieces: list[CallBegin | CallArguments] = []
        self.raw = ""

    def feed(self, char: str) -> CallState:
        """Read one character."""
        text = self._json.feed(char)
        if text is None:
            return CallState.FAULTY
        if not self.has_begun:
            self.has_begun = True
            self.pieces.append(CallBegin(self._name))
        self.pieces.append(CallArguments(text))
        self.is_whole = self._json.is_done
        return CallState.DONE if self.is_whole else CallState.OPEN


def _as_object(value: str) -> str | None:
    """Return arguments as a JSON object; models also write a string, or null."""
    if value.startswith('"'):
        value = json.loads(value).strip() or "{}"
    elif value == "null":
        value = "{}"
    is_text = not any("\ud800" <= char <= "\udfff" for char in value)  # halves of a surrogate pair cannot be sent
    return value if value.startswith("{") and is_text else None


class JsonToolParser(PieceParser):
    """`push` text, `finish` at its end. `names` are the request's tools."""

    def __init__(self, tool_format: ToolFormat, names: frozenset[str]) -> None:
        super().__init__(self._text)
        self._format = tool_format
        self._names = names
        self._openings = tuple(opening for opening, _ in tool_format.marks)
        self._held = ""  # read since the last call or content: markup if a call follows, content if not
        self._closing = ""  # the mark that may end the current calls
        self._in_list = False
        self._reader: CallReader | ArgumentsReader = CallReader(self._accepts)
        self._is_fresh = True  # nothing but space so far
        self._has_called = False

    def finish(self) -> list[Piece]:
        """Return what was held back. Ends the text."""
        rest = self._held + (self._reader.raw if self._step == self._call else "") + self._buffer
        if self._step == self._broken:
            self._pieces.append(CallArguments(rest))
        elif not (self._has_called and self._is_markup(rest)):
            self._content(rest)
        self._buffer = self._held = ""
        return self._take()

    def _is_markup(self, rest: str) -> bool:
        """Return True if the end of a text with calls is only space or a cut mark."""
        if self._step == self._text:
            return not rest.strip()
        return self._step == self._after and self._closing.startswith(rest.strip())

    def _accepts(self, name: str) -> bool:
        return name in self._names if self._format.only_known else bool(_NAME.fullmatch(name))

    def _content(self, text: str) -> None:
        if text:
            self._pieces.append(Content(text))
            self._is_fresh = False

    def _text(self) -> bool:
        """Read content up to a mark, holding back space, which may belong to the mark."""
        buffer = self._buffer
        words = buffer.lstrip()
        if self._is_fresh and self._format.is_bare and words[:1] in ("{", "["):
            return self._open(len(buffer) - len(words), "")
        if found := first_of(buffer, self._openings):
            at, mark = found
            before = buffer[:at].rstrip()
            self._content(before)
            self._buffer = buffer[len(before) :]
            return self._open(at - len(before) + len(mark), dict(self._format.marks)[mark])
        certain = buffer[: len(buffer) - held_back(buffer, self._openings)].rstrip()
        self._content(certain)
        self._buffer = buffer[len(certain) :]
        return False

    def _open(self, num_chars: int, closing: str) -> bool:
        """Hold the first characters of the buffer, which announce calls."""
        self._held, self._buffer = self._buffer[:num_chars], self._buffer[num_chars:]
        self._closing = closing
        self._in_list = self._is_fresh = False
        self._step = self._payload
        return True

    def _payload(self) -> bool:
        """Read the beginning of a call, after a mark or between two calls of a list."""
        first = self._skip_space()
        if first == "{":
            self._reader = CallReader(self._accepts)
            self._step = self._call
            return True
        if first == "[" and not self._in_list:
            self._in_list = True
            self._move(1)
            return True
        if first and self._format.leads_with_name and not self._in_list:
            self._step = self._name
            return True
        return self._no_call() if first else False

    def _name(self) -> bool:
        """Read a name that is followed by its arguments."""
        buffer, end = self._buffer, self._format.name_end
        match = _NAME.match(buffer)
        if match is None:
            return self._no_call()
        rest = buffer[match.end() :].lstrip()
        if end and rest.startswith(end):
            rest = rest[len(end) :].lstrip()
        elif end.startswith(rest):
            return False
        if not rest:
            return False
        if not rest.startswith("{"):
            return self._no_call()
        self._move(len(buffer) - len(rest))
        self._reader = ArgumentsReader(match.group())
        self._step = self._call
        return True

    def _call(self) -> bool:
        """Read a call, character by character."""
        state, taken = CallState.OPEN, 0
        for char in self._buffer:
            state = self._reader.feed(char)
            if state is CallState.FAULTY:
                break
            taken += 1
            if state is CallState.DONE:
                break
        self._buffer = self._buffer[taken:]
        self._give_call()
        if state is CallState.OPEN:
            return False
        if state is CallState.DONE or self._reader.is_whole:
            self._step = self._after
        elif self._reader.has_begun:
            self._step = self._broken
        else:
            self._held += self._reader.raw
            return self._no_call()
        return True

    def _give_call(self) -> None:
        """Pass on the known part of the call, its arguments in one piece."""
        pieces, self._reader.pieces = self._reader.pieces, []
        if not pieces:
            return
        self._held, self._has_called = "", True
        if isinstance(pieces[0], CallBegin):
            self._pieces.append(pieces.pop(0))
        arguments = "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))
        if arguments:
            self._pieces.append(CallArguments(arguments))

    def _after(self) -> bool:
        """Read the text after a call: an end mark, another call, or content."""
        first = self._skip_space()
        if not first:
            return False
        if self._in_list and first == "]":
            self._in_list = False
            self._held, self._buffer = "", self._buffer[1:]
            return True
        if self._closing and not self._in_list:
            if self._buffer.startswith(self._closing):
                self._held, self._buffer = "", self._buffer[len(self._closing) :]
                self._step = self._text
                return True
            if self._closing.startswith(self._buffer):
                return False
        if first in _SEPARATORS and (self._in_list or self._format.is_bare):
            self._move(1)
            self._step = self._payload
            return True
        return self._no_call()

    def _broken(self) -> bool:
        """Read the text after a fault in arguments, up to the next mark."""
        marks = (*self._openings, self._closing) if self._closing else self._openings
        found = first_of(self._buffer, marks)
        if found is None:
            certain = len(self._buffer) - held_back(self._buffer, marks)
            if certain:
                self._pieces.append(CallArguments(self._buffer[:certain]))
            self._buffer = self._buffer[certain:]
            return False
        at, mark = found
        if at:
            self._pieces.append(CallArguments(self._buffer[:at]))
        self._buffer = self._buffer[at + (len(mark) if mark == self._closing else 0) :]
        self._step = self._text
        return True

    def _no_call(self) -> bool:
        """Make content of the held text; the next text may be content too."""
        held = self._held
        self._held = ""
        self._step = self._text
        if held.strip():
            self._content(held)
        else:
            self._buffer = held + self._buffer
        return True

    def _skip_space(self) -> str:
        """Hold space and return the character after it."""
        self._move(len(self._buffer) - len(self._buffer.lstrip()))
        return self._buffer[:1]

    def _move(self, num_chars: int) -> None:
        self._held, self._buffer = self._held + self._buffer[:num_chars], self._buffer[num_chars:]
