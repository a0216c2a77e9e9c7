"""Thoughts and answer told apart: models that reason first write between <think> and </think>, or tags like these.

Space around the tags belongs to them. A text that does not begin with thoughts has none: a later tag is only text.
One splitter a choice, pure, on the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from server.tools.parser import held_back
from server.tools.pieces import Content, Piece, Reasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningTags:
    """How a family of models marks its thoughts."""

    name: str
    opening: str
    closing: str
    always: bool = False  # an answer begins with thoughts even where nobody wrote the opening tag

    def begins_within(self, prompt: str, continued: str = "") -> bool:
        """True if the answer to a prompt begins with thoughts: the chat template has opened them, or the message that
        is to be continued has."""
        end = prompt.rstrip()
        if continued.rfind(self.opening) > continued.rfind(self.closing) or end.endswith(self.opening):
            return True
        return self.always and self.closing not in continued and not end.endswith(self.closing)


REASONING_TAGS = {
    tags.name: tags
    for tags in (
        ReasoningTags(name="qwen3", opening="<think>", closing="</think>"),
        ReasoningTags(name="deepseek_r1", opening="<think>", closing="</think>", always=True),
        ReasoningTags(name="mistral", opening="[THINK]", closing="[/THINK]"),
    )
}


def detect_reasoning(template: str) -> ReasoningTags | None:
    """The tags that a chat template speaks of."""
    return next((tags for tags in REASONING_TAGS.values() if tags.closing in template), None)


class _State(Enum):
    START = auto()  # thoughts may begin
    THOUGHTS = auto()
    ANSWER = auto()


class ReasoningSplitter:
    """push text as it comes, finish at its end."""

    def __init__(self, tags: ReasoningTags, *, begins_within: bool) -> None:
        self._tags = tags
        self._begins_within = begins_within
        self._state = _State.START
        self._buffer = ""
        self._skips_space = False  # what comes next follows a tag

    @property
    def is_reasoning(self) -> bool:
        """True if what comes next is thoughts."""
        return self._state is _State.THOUGHTS or (self._begins_within and self._state is _State.START)

    def push(self, text: str) -> list[Piece]:
        """What is certain now."""
        self._buffer += text
        if self._state is _State.START:
            self._begin()
        thoughts = self._think() if self._state is _State.THOUGHTS else []
        return thoughts + self._answer()

    def finish(self) -> list[Piece]:
        """What was held back. Ends the text."""
        rest, self._buffer = self._buffer, ""
        return self._piece(Reasoning, rest.rstrip()) if self.is_reasoning else self._piece(Content, rest)

    def _begin(self) -> None:
        """Decide, as soon as it is certain, what the text begins with."""
        words, opening = self._buffer.lstrip(), self._tags.opening
        if words.startswith(opening):
            self._buffer = words[len(opening) :]
        elif opening.startswith(words):
            return
        elif not self._begins_within:
            self._state = _State.ANSWER
            return
        self._state, self._skips_space = _State.THOUGHTS, True

    def _think(self) -> list[Piece]:
        """What is certainly a thought: neither the closing tag, nor its beginning, nor space that may precede it."""
        thoughts, tag, answer = self._buffer.partition(self._tags.closing)
        if tag:
            pieces = self._piece(Reasoning, thoughts.rstrip())
            self._buffer, self._state, self._skips_space = answer, _State.ANSWER, True
            return pieces
        thoughts = self._buffer[: len(self._buffer) - held_back(self._buffer, (self._tags.closing,))].rstrip()
        self._buffer = self._buffer[len(thoughts) :]
        return self._piece(Reasoning, thoughts)

    def _answer(self) -> list[Piece]:
        if self._state is not _State.ANSWER:
            return []
        answer, self._buffer = self._buffer, ""
        return self._piece(Content, answer)

    def _piece(self, kind: type[Reasoning | Content], text: str) -> list[Piece]:
        if self._skips_space:
            text = text.lstrip()
        if not text:
            return []
        self._skips_space = False
        return [kind(text)]
