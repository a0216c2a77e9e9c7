"""The arguments of calls that arrive in pieces: where a JSON object ends, and the base of parsers of arguments. Pure."""

from __future__ import annotations

import json

from engine.text.tools.python_literals import LiteralReader
from engine.text.tools.tool_format import CallParser

_BARE = frozenset(" \t\r\n,:+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")  # outside strings
_CLOSING = {"{": "}", "[": "]"}


class JsonScanner:
    """Finds the end of a JSON object that arrives in pieces, or its first fault.

    A parser that needs the whole text cannot stream arguments; jiter's partial mode does not report the end of a value.
    JSON forbids line breaks within strings, but models write them: their escapes are returned.
    """

    def __init__(self, *, is_open: bool = False) -> None:
        """`is_open` for the rest of an object."""
        self._open = ["}"] if is_open else []  # the closing brackets that are still missing
        self._in_string = self._is_escaped = False
        self.is_done = self.is_faulty = False

    def read(self, text: str) -> tuple[str, str]:
        """Return the part of a text before the end or the fault, mended, and the rest."""
        read = []
        for at, char in enumerate(text):
            if self._in_string:
                read.append(self._string(char))
            elif self._bare(char):
                read.append(char)
            else:
                self.is_faulty = True
                return "".join(read), text[at:]
            if not self._open:
                self.is_done = True
                return "".join(read), text[at + 1 :]
        return "".join(read), ""

    def _string(self, char: str) -> str:
        """Read a character within a string."""
        if self._is_escaped:
            self._is_escaped = False
        elif char == '"':
            self._in_string = False
        elif char == "\\":
            self._is_escaped = True
        return char if char >= " " else json.dumps(char)[1:-1]

    def _bare(self, char: str) -> bool:
        """Read a character outside strings; return False if it does not fit."""
        if char in _CLOSING:
            self._open.append(_CLOSING[char])
        elif char == '"':
            self._in_string = True
        elif char in "]}":
            return bool(self._open) and self._open.pop() == char
        elif char not in _BARE:
            return False
        return True


class ArgumentsParser(CallParser):
    """Base of parsers of calls whose arguments are a JSON object, or literals that become one."""

    def __init__(self, openings: tuple[str, ...]) -> None:
        super().__init__(openings)
        self._stops = openings
        self._scanner: JsonScanner | LiteralReader = JsonScanner()

    def _read_arguments(self) -> bool:
        """Read more of an object or literal, up to its end or its first fault."""
        num_left = len(self._buffer)
        text, self._buffer = self._scanner.read(self._buffer)
        self._arguments(text)
        if self._scanner.is_faulty:
            self._step = self._broken
        elif self._scanner.is_done:
            self._end_arguments()
        return self._step != self._read_arguments or len(self._buffer) < num_left

    def _end_arguments(self) -> None:
        self._step = self._after
