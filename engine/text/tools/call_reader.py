"""Reads one call, as families write it: {"name": ..., "arguments": {...}}, or arguments alone behind a name.

A call is not a call before its name and the brace of its arguments have been read: until then it can still turn out to
be text, and `raw` is what to show. From there on its arguments are given away as they come. Pure, event loop.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum, auto

from engine.text.tools.json_reader import JsonReader
from engine.text.tools.pieces import CallArguments, CallBegin

_ARGUMENTS = ("arguments", "parameters")


class CallState(Enum):
    """Where a call is."""

    OPEN = auto()
    DONE = auto()
    FAULTY = auto()  # the character given last cannot come there and was not taken


class CallReader:
    """feed characters while OPEN. `accepts` tells whether a name is one of a tool."""

    __slots__ = ("_accepts", "_arguments", "_json", "_member", "_name", "has_begun", "is_whole", "pieces", "raw")

    def __init__(self, accepts: Callable[[str], bool]) -> None:
        self._accepts = accepts
        self._json = JsonReader()
        self._name: str | None = None
        self._arguments: str | None = None  # that came before the name, or in a form of their own
        self._member = ""  # the value being read, as far as somebody will want it whole
        self.has_begun = False
        self.is_whole = False  # all arguments have been given away
        self.pieces: list[CallBegin | CallArguments] = []
        self.raw = ""  # what was read before the call had begun

    def feed(self, char: str) -> CallState:
        """Take one character."""
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
        if not is_call:  # only before it has begun
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
        """A member's value has been read; False if it makes this no call."""
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
        """The object has been read; False if it is no call."""
        if self.has_begun:
            return True
        if self._name is None:
            return False
        self._begin()
        self.pieces.append(CallArguments(self._arguments or "{}"))
        self.is_whole = True
        return True


class ArgumentsReader:
    """Reads the arguments of a call whose name stands before them. Feed it as a CallReader."""

    __slots__ = ("_json", "_name", "has_begun", "is_whole", "pieces", "raw")

    def __init__(self, name: str) -> None:
        self._json = JsonReader()
        self._name = name
        self.has_begun = self.is_whole = False
        self.pieces: list[CallBegin | CallArguments] = []
        self.raw = ""

    def feed(self, char: str) -> CallState:
        """Take one character."""
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
    """Arguments as the JSON of an object: some models write them as a string, some write null for none."""
    if value.startswith('"'):
        value = json.loads(value).strip() or "{}"
    elif value == "null":
        value = "{}"
    is_text = not any("\ud800" <= char <= "\udfff" for char in value)  # halves of a pair cannot be sent
    return value if value.startswith("{") and is_text else None
