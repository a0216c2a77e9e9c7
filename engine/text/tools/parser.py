"""Finds the calls of tools in a model's text while it is being written.

One object a choice, on the event loop. What comes out does not depend on how the text was cut into pieces, and no
character of it is lost but the markup of calls: what turns out not to be a call is content, exactly as it was written,
and what goes wrong within the arguments of a call that has begun stays in them. Never raises.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.text.tools.call_reader import ArgumentsReader, CallReader, CallState
from engine.text.tools.pieces import CallArguments, CallBegin, Content, Piece
from engine.text.tools.splitter import Splitter, first_of, held_back

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_SEPARATORS = ",;"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How a family of models writes calls."""

    name: str
    marks: tuple[tuple[str, str], ...] = ()  # what stands before calls, and what after them, perhaps nothing
    is_bare: bool = False  # an answer may also begin with a call without any mark
    only_known: bool = False  # JSON that names no tool of the request is content, not a call
    leads_with_name: bool = False  # a mark may be followed by name{...} as well
    name_end: str = ""  # what may stand between such a name and its arguments
    is_xml: bool = False  # names and parameters are tags: engine/text/tools/xml_parser.py
    id_length: int = 0  # of a call's id, where templates insist on one


class ToolParser(Splitter):
    """push text as it comes, finish at its end. `names` are those of the request's tools."""

    def __init__(self, dialect: Dialect, names: frozenset[str]) -> None:
        super().__init__(self._text)
        self._dialect = dialect
        self._names = names
        self._openings = tuple(opening for opening, _ in dialect.marks)
        self._held = ""  # read since the last call or content: markup, if a call comes of it, and content if not
        self._closing = ""  # what may end the calls at hand
        self._in_list = False
        self._reader: CallReader | ArgumentsReader = CallReader(self._accepts)
        self._is_fresh = True  # nothing but space so far
        self._has_called = False

    def finish(self) -> list[Piece]:
        """What was held back. Ends the text."""
        rest = self._held + (self._reader.raw if self._step == self._call else "") + self._buffer
        if self._step == self._broken:
            self._pieces.append(CallArguments(rest))
        elif not (self._has_called and self._is_markup(rest)):
            self._content(rest)
        self._buffer = self._held = ""
        return self._take()

    def _is_markup(self, rest: str) -> bool:
        """True if this end of a text with calls is only space, or an end mark that was cut short."""
        if self._step == self._text:
            return not rest.strip()
        return self._step == self._after and self._closing.startswith(rest.strip())

    def _accepts(self, name: str) -> bool:
        return name in self._names if self._dialect.only_known else bool(_NAME.fullmatch(name))

    def _content(self, text: str) -> None:
        if text:
            self._pieces.append(Content(text))
            self._is_fresh = False

    def _text(self) -> bool:
        """Words for the user, up to a mark. Space before a mark belongs to it, so space waits for what follows."""
        buffer = self._buffer
        words = buffer.lstrip()
        if self._is_fresh and self._dialect.is_bare and words[:1] in ("{", "["):
            return self._open(len(buffer) - len(words), "")
        if found := first_of(buffer, self._openings):
            at, mark = found
            before = buffer[:at].rstrip()
            self._content(before)
            self._buffer = buffer[len(before) :]
            return self._open(at - len(before) + len(mark), dict(self._dialect.marks)[mark])
        certain = buffer[: len(buffer) - held_back(buffer, self._openings)].rstrip()
        self._content(certain)
        self._buffer = buffer[len(certain) :]
        return False

    def _open(self, num_chars: int, closing: str) -> bool:
        """The first characters of the buffer announce calls."""
        self._held, self._buffer = self._buffer[:num_chars], self._buffer[num_chars:]
        self._closing = closing
        self._in_list = self._is_fresh = False
        self._step = self._payload
        return True

    def _payload(self) -> bool:
        """Behind a mark, or between two calls of a list: a call must begin."""
        first = self._skip_space()
        if first == "{":
            self._reader = CallReader(self._accepts)
            self._step = self._call
            return True
        if first == "[" and not self._in_list:
            self._in_list = True
            self._move(1)
            return True
        if first and self._dialect.leads_with_name and not self._in_list:
            self._step = self._name
            return True
        return self._no_call() if first else False

    def _name(self) -> bool:
        """A name whose arguments follow it."""
        buffer, end = self._buffer, self._dialect.name_end
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
        """A call, character by character."""
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
        """Pass on what is known of the call, its arguments in one piece."""
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
        """Behind a call: the end of its list, its end mark, another call, or something else."""
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
        if first in _SEPARATORS and (self._in_list or self._dialect.is_bare):
            self._move(1)
            self._step = self._payload
            return True
        return self._no_call()

    def _broken(self) -> bool:
        """What follows a fault in arguments is part of them, up to the next mark."""
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
        """What was held is content after all, and so may be what follows."""
        held = self._held
        self._held = ""
        self._step = self._text
        if held.strip():
            self._content(held)
        else:
            self._buffer = held + self._buffer
        return True

    def _skip_space(self) -> str:
        """Set space aside; returns the character behind it."""
        self._move(len(self._buffer) - len(self._buffer.lstrip()))
        return self._buffer[:1]

    def _move(self, num_chars: int) -> None:
        self._held, self._buffer = self._held + self._buffer[:num_chars], self._buffer[num_chars:]
