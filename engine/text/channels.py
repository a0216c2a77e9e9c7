"""Separates thoughts, content and calls in OpenAI's harmony format (gpt-oss).

    <|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>commentary to=functions.name
    <|constrain|>json<|message|>{...}<|call|>        or        ...<|channel|>final<|message|>words<|return|>

The prompt ends with `<|start|>assistant`. A text that does not continue as above, under a grammar for example, is all
content.
"""

from __future__ import annotations

import re
from collections.abc import Container

from engine.text.types import CallArguments, CallBegin, Content, Piece, PieceParser, Reasoning, first_of, held_back

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
CHANNEL_NAMES = ("harmony", "openai_gptoss")  # of --reasoning-parser; the latter is vLLM's
FUNCTIONS = "functions."
_BUILT_IN = (
    "assistant",
    "python",
    "browser",
    "container",
)  # recipients that are no function, and how their parts begin
_TO = " to="  # may come before the channel
_AFTER_BODY = (*ENDS, START, CHANNEL)
_MAX_HEADER = 500  # characters; a longer one is not a header
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


class ChannelParser(PieceParser):
    """`push` text, `finish` at its end. Calls are thoughts unless it `reads_calls`.

    `tools` are the request's; only these may have the name of a tool that the model was trained with.
    """

    def __init__(self, *, reads_calls: bool, tools: Container[str] = ()) -> None:
        super().__init__(self._beginning)
        self._reads_calls = reads_calls
        self._tools = tools
        self._kind: type[Reasoning | Content | CallArguments] = Content  # of the current body
        self._is_empty = True  # none of it has been passed on
        self._has_thought = self._has_said = False  # a message of this kind has begun

    @property
    def is_reasoning(self) -> bool:
        """True if the next text is thoughts."""
        return self._step == self._body and self._kind is Reasoning

    def finish(self) -> list[Piece]:
        """Return what was held back, without a header that was cut short. Ends the text."""
        if self._step == self._body:
            self._give(self._buffer)
            self._end_body()
        elif self._step != self._header:
            self._kind = Content
            self._give(self._buffer if self._step == self._beginning else self._buffer.strip())
        self._buffer = ""
        return self._take()

    def _give(self, text: str) -> None:
        if text:
            self._pieces.append(self._kind(text))
            self._is_empty = False

    def _end_body(self) -> None:
        if self._kind is CallArguments and self._is_empty:
            self._give("{}")

    def _beginning(self) -> bool:
        return self._next_header((CHANNEL, _TO))

    def _next_header(self, marks: tuple[str, ...]) -> bool:
        """Read one of the marks before a header, or content."""
        if self._buffer.startswith(marks):
            self._step = self._header
            return True
        return not any(mark.startswith(self._buffer) for mark in marks) and self._begin_body(Content)

    def _header(self) -> bool:
        """Read the recipient and the channel, up to the message."""
        at = self._buffer.find(MESSAGE)
        if at < 0 and len(self._buffer) < _MAX_HEADER + len(MESSAGE):
            return False
        if not 0 <= at <= _MAX_HEADER:
            self._begin_body(Content)
            self._give(self._buffer[0])  # so that this mark is not found again
            self._buffer = self._buffer[1:]
            return True
        header, self._buffer = self._buffer[:at], self._buffer[at + len(MESSAGE) :]
        recipient, channel = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
        name = recipient[1].removeprefix(FUNCTIONS) if recipient else ""
        if recipient and self._reads_calls and self._is_function(recipient[1], name):
            self._pieces.append(CallBegin(name))
            return self._begin_body(CallArguments)
        if recipient or (channel and channel[1] == "analysis"):
            if self._has_thought:
                self._pieces.append(Reasoning("\n"))
            self._has_thought = True
            return self._begin_body(Reasoning)
        if self._has_said:
            self._pieces.append(Content("\n"))
        self._has_said = True
        return self._begin_body(Content)

    def _is_function(self, recipient: str, name: str) -> bool:
        """Return True if a recipient is a function of the client."""
        is_own = recipient != name or name in self._tools or not name.startswith(_BUILT_IN)
        return is_own and _NAME.fullmatch(name) is not None

    def _begin_body(self, kind: type[Reasoning | Content | CallArguments]) -> bool:
        self._kind, self._is_empty, self._step = kind, True, self._body
        return True

    def _body(self) -> bool:
        found = first_of(self._buffer, _AFTER_BODY)
        if found is None:
            certain = len(self._buffer) - held_back(self._buffer, _AFTER_BODY)
            self._give(self._buffer[:certain])
            self._buffer = self._buffer[certain:]
            return False
        at, mark = found
        self._give(self._buffer[:at])
        self._end_body()
        self._buffer = self._buffer[at + (len(mark) if mark in ENDS else 0) :]
        self._step = self._between
        return True

    def _between(self) -> bool:
        """Read the text after a message: the next message, or content."""
        self._buffer = self._buffer.lstrip()
        return self._next_header((START, CHANNEL))
