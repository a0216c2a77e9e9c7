"""Translates Python literals into JSON, as they arrive in pieces. Pure."""

from __future__ import annotations

import json
import math
import re
import unicodedata

WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_CLOSERS = {"[": ("[", "]"), "(": ("[", ")"), "{": ("{", "}")}  # JSON's bracket, and Python's closing one
_WORD = re.compile(r"[-+\w.]+")
_MAX_WORD = 500  # characters
_QUOTES = ("'", '"')
_STOPS = {quote: re.compile(rf"[{quote}\\]") for quote in _QUOTES}  # where the plain text of a string ends
_PREFIXES = ("r", "u", "f", "")  # of strings; an f-string's fields stay text
_ESCAPES = {"\n": "", "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_ESCAPES |= {char: char for char in "\\'\"/"}  # the slash is JSON's
_CODE = re.compile(r"([0-7]{1,3})|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|N\{([^{}]{1,99})\}")
_PART_OF_CODE = re.compile(r"(?:[0-7]{0,2}|x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|N(?:\{[^{}]{0,99})?)")


class LiteralReader:
    """`read` a literal until it `is_done` or `is_faulty`: strings, numbers, words, lists, tuples and dicts."""

    def __init__(self) -> None:
        self._open: list[str] = []  # the closing brackets that are still missing
        self._quote = ""  # of the current string
        self._is_raw = False
        self._expects = "value"  # or a key, a colon, or what comes next after an item
        self._is_key = False
        self._is_first = True  # no item since the last bracket
        self.is_done = self.is_faulty = False

    def read(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """Return JSON for the part of a text that is certain, and the rest."""
        written: list[str] = []
        at = 0
        while at < len(text) and not (self.is_done or self.is_faulty):
            step = self._string if self._quote else self._token
            json_text, num_read = step(text, at, is_last)
            if not num_read:
                break
            written.append(json_text)
            at += num_read
        return "".join(written), text[at:]

    def _token(self, text: str, at: int, is_last: bool) -> tuple[str, int]:
        """Return JSON for the next token outside strings, and its length; 0 to wait for more."""
        char = text[at]
        if char.isspace():
            return "", 1
        if self._open and char == self._open[-1] and self._expects in ("next", "key", "value") and not self._is_half():
            closer = "}" if self._open.pop() == "}" else "]"
            self._is_key = False
            self._end_item()
            return closer, 1
        if self._expects == "next" and char == ",":
            self._expects = "key" if self._open[-1] == "}" else "value"
            return "", 1
        if self._expects == "colon" and char == ":":
            self._expects, self._is_key = "value", False
            return ": ", 1
        if self._expects in ("next", "colon"):
            return self._fault()
        return self._item(text, at, is_last)

    def _is_half(self) -> bool:
        """Return True behind a colon, where a value must come."""
        return self._expects == "value" and bool(self._open) and self._open[-1] == "}"

    def _item(self, text: str, at: int, is_last: bool) -> tuple[str, int]:
        """Return JSON for the beginning of a value, or for all of a short one."""
        comma = "" if self._is_first or self._is_half() else ", "
        char, self_is_key = text[at], self._expects == "key"
        if char in _CLOSERS and not self_is_key:
            bracket, closer = _CLOSERS[char]
            self._open.append(closer)
            self._is_first, self._expects = True, "key" if char == "{" else "value"
            return comma + bracket, 1
        match = _WORD.match(text, at)
        end = match.end() if match else at
        word = text[at:end]
        if end == len(text) and not is_last:
            return self._fault() if len(word) > _MAX_WORD else ("", 0)
        if end < len(text) and text[end] in _QUOTES and word.lower() in _PREFIXES:
            return self._begin_string(text, end, comma, len(word), is_last)
        value = _json_of_word(word)
        if value is None:
            return self._fault()
        if self_is_key:
            value = json.dumps(value)
        self._is_key = self_is_key
        self._end_item()
        return comma + value, end - at

    def _begin_string(self, text: str, at: int, comma: str, num_prefix: int, is_last: bool) -> tuple[str, int]:
        quote, rest = text[at], text[at : at + 3]
        if rest == quote * len(rest) and len(rest) < 3 and not is_last:
            return "", 0  # may be a triple quote
        self._quote = quote * 3 if rest == quote * 3 else quote
        self._is_raw = num_prefix > 0 and text[at - 1] in "rR"
        self._is_key = self._expects == "key"
        return comma + '"', num_prefix + len(self._quote)

    def _string(self, text: str, at: int, is_last: bool) -> tuple[str, int]:
        """Return JSON for more of a string, and the length of its text."""
        quote = self._quote
        found = _STOPS[quote[0]].search(text, at)
        end = found.start() if found else len(text)
        if end > at:
            return json.dumps(text[at:end], ensure_ascii=False)[1:-1], end - at
        if text[at] == "\\":
            return self._escape(text, at + 1, is_last)
        if text.startswith(quote, at):
            self._quote = ""
            self._end_item()
            return '"', len(quote)
        if quote.startswith(text[at:]) and not is_last:
            return "", 0
        return json.dumps(text[at])[1:-1], 1

    def _escape(self, text: str, at: int, is_last: bool) -> tuple[str, int]:
        """Return JSON for the escape sequence after a backslash."""
        if at == len(text):
            return ("\\\\", 1) if is_last else ("", 0)
        char = text[at]
        if self._is_raw:
            return json.dumps("\\" + char, ensure_ascii=False)[1:-1], 2
        if char in _ESCAPES:
            return json.dumps(_ESCAPES[char])[1:-1], 2
        if _PART_OF_CODE.fullmatch(text, at) and not is_last:
            return "", 0
        code = _CODE.match(text, at)
        found = _char_of(code) if code else None
        if code is None or found is None:
            return "\\\\", 1  # Python keeps the backslash of an unknown sequence
        is_half = "\ud800" <= found <= "\udfff"  # of a surrogate pair, which cannot be sent as a character
        return json.dumps(found, ensure_ascii=is_half)[1:-1], 1 + len(code.group())

    def _end_item(self) -> None:
        self._is_first = False
        if not self._open:
            self.is_done = True
        self._expects = "colon" if self._is_key else "next"

    def _fault(self) -> tuple[str, int]:
        self.is_faulty = True
        return "", 0


def json_of_literal(text: str) -> str | None:
    """Return a whole Python literal as JSON, or None for another text."""
    reader = LiteralReader()
    written, rest = reader.read(text, is_last=True)
    return written if reader.is_done and not rest.strip() else None


def _json_of_word(word: str) -> str | None:
    """Return a number or constant as JSON, or None."""
    if word in WORDS:
        return WORDS[word]
    if not any(char.isdigit() for char in word):
        return None
    for read in (int, lambda digits: int(digits, 0), float):
        try:
            value = read(word)
        except ValueError:
            continue
        return json.dumps(value) if math.isfinite(value) else None
    return None


def _char_of(code: re.Match[str]) -> str | None:
    octal, *hexadecimal, name = code.groups()
    try:
        if name is not None:
            return unicodedata.lookup(name)
        digits = octal or next(filter(None, hexadecimal))
        return chr(int(digits, 8 if octal else 16))
    except (KeyError, ValueError, OverflowError):
        return None
