"""Reads one JSON object character by character, to its end or first fault.

A parser that needs the whole text cannot stream the arguments of a call that is still being written. jiter's partial mode
parses the whole text again for each piece, does not report the end of a value, and refuses the line breaks that
models write within strings. Pure; one reader for each call. Independent of tools.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

_SPACE = " \t\n\r"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_SCALAR_LETTERS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")
_WORDS = frozenset(("true", "false", "null"))
_ESCAPES = frozenset('"\\/bfnrtu')


class _Want(Enum):
    """The next part of the text."""

    OBJECT = auto()  # the very first character
    FIRST_KEY = auto()  # or the end of an object without members
    KEY = auto()
    COLON = auto()
    FIRST_ITEM = auto()  # or the end of an empty array
    VALUE = auto()
    STRING = auto()  # the rest of one
    ESCAPE = auto()
    HEX = auto()
    SCALAR = auto()  # the rest of a number or word
    SEPARATOR = auto()  # or the end of what is open
    NOTHING = auto()


_IN_STRING = (_Want.STRING, _Want.ESCAPE, _Want.HEX)


class JsonReader:
    """`feed` characters until `is_done`.

    JSON forbids line breaks and other control characters within strings, but models write them; `feed` returns their
    escapes.
    """

    __slots__ = ("_is_key", "_num_hex", "_open", "_scalar", "_want", "key")

    def __init__(self) -> None:
        self._want = _Want.OBJECT
        self._open: list[str] = []  # the closing brackets that are still missing
        self._is_key = False  # the string being read names a member
        self._num_hex = 0
        self._scalar = ""
        self.key = ""  # the member of the outermost object, as written between its quotes

    @property
    def is_done(self) -> bool:
        """True if the object has ended."""
        return self._want is _Want.NOTHING

    @property
    def is_in_value(self) -> bool:
        """True within a value of the outermost object, before its last character."""
        if len(self._open) != 1:
            return len(self._open) > 1
        return self._want is _Want.SCALAR or (self._want in _IN_STRING and not self._is_key)

    @property
    def is_in_scalar(self) -> bool:
        """True within a number or word, which ends before the next character."""
        return len(self._open) == 1 and self._want is _Want.SCALAR

    def feed(self, char: str) -> str | None:
        """Return a character as valid JSON, or None if it does not fit."""
        want = self._want
        if want is _Want.STRING:
            return self._in_string(char)
        if want is _Want.ESCAPE:
            return self._in_escape(char)
        if want is _Want.HEX:
            return self._in_hex(char)
        if want is _Want.SCALAR:
            if char in _SCALAR_LETTERS:
                self._scalar += char
                return char
            if self._scalar not in _WORDS and not _NUMBER.fullmatch(self._scalar):
                return None
            self._want = _Want.SEPARATOR
        if char in _SPACE and self._want is not _Want.NOTHING:
            return char
        return char if self._between(char) else None

    def _between(self, char: str) -> bool:
        """Read a character outside strings and scalars; return whether it fits."""
        want = self._want
        if want is _Want.OBJECT:
            return char == "{" and self._begin_value(char)
        if want is _Want.FIRST_ITEM and char == "]":
            return self._close(char)
        if want in (_Want.VALUE, _Want.FIRST_ITEM):
            return self._begin_value(char)
        if want in (_Want.KEY, _Want.FIRST_KEY) and char == '"':
            self._want, self._is_key = _Want.STRING, True
            if len(self._open) == 1:
                self.key = ""
            return True
        if want is _Want.COLON and char == ":":
            self._want = _Want.VALUE
            return True
        if want is _Want.SEPARATOR and char == ",":
            self._want = _Want.KEY if self._open[-1] == "}" else _Want.VALUE
            return True
        return want in (_Want.SEPARATOR, _Want.FIRST_KEY) and self._close(char)

    def _begin_value(self, char: str) -> bool:
        if char == "{":
            self._open.append("}")
            self._want = _Want.FIRST_KEY
        elif char == "[":
            self._open.append("]")
            self._want = _Want.FIRST_ITEM
        elif char == '"':
            self._want, self._is_key = _Want.STRING, False
        elif char in _SCALAR_LETTERS:
            self._want, self._scalar = _Want.SCALAR, char
        else:
            return False
        return True

    def _close(self, char: str) -> bool:
        if self._open[-1] != char:
            return False
        self._open.pop()
        self._want = _Want.SEPARATOR if self._open else _Want.NOTHING
        return True

    def _in_string(self, char: str) -> str:
        if char == '"':
            self._want = _Want.COLON if self._is_key else _Want.SEPARATOR
            return char
        if char == "\\":
            self._want = _Want.ESCAPE
        return self._noted(char if char >= " " else json.dumps(char)[1:-1])

    def _in_escape(self, char: str) -> str | None:
        if char not in _ESCAPES:
            return None
        self._num_hex = 0
        self._want = _Want.HEX if char == "u" else _Want.STRING
        return self._noted(char)

    def _in_hex(self, char: str) -> str | None:
        if char not in "0123456789abcdefABCDEF":
            return None
        self._num_hex += 1
        if self._num_hex == 4:
            self._want = _Want.STRING
        return self._noted(char)

    def _noted(self, text: str) -> str:
        if self._is_key and len(self._open) == 1:
            self.key += text
        return text
