"""Separates thoughts between tags like <think> and </think> from the answer.

Space around the tags belongs to them. A text that does not begin with thoughts has none: a later tag is text. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.text.piece_parser import PieceParser, held_back
from engine.text.types import Content, Piece, Reasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningTags:
    """How a family of models marks its thoughts."""

    name: str
    opening: str
    closing: str
    always: bool = False  # an answer begins with thoughts even without the opening tag

    def begins_within(self, prompt: str, continued: str = "") -> bool:
        """Return True if the prompt or the continued message has opened thoughts."""
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
    """Return the tags that a chat template mentions."""
    return next((tags for tags in REASONING_TAGS.values() if tags.closing in template), None)


class ReasoningParser(PieceParser):
    """`push` text as it arrives, `finish` at its end."""

    def __init__(self, tags: ReasoningTags, *, begins_within: bool) -> None:
        super().__init__(self._begin)
        self._tags = tags
        self._begins_within = begins_within
        self._skips_space = False  # the next text follows a tag

    @property
    def is_reasoning(self) -> bool:
        """True if the next text is thoughts."""
        return self._step == self._think or (self._begins_within and self._step == self._begin)

    def finish(self) -> list[Piece]:
        """Return what was held back. Ends the text."""
        if self.is_reasoning:
            self._give(Reasoning, self._buffer.rstrip())
        else:
            self._give(Content, self._buffer)
        self._buffer = ""
        return self._take()

    def _begin(self) -> bool:
        """Decide whether the text begins with thoughts, as soon as that is certain."""
        words, opening = self._buffer.lstrip(), self._tags.opening
        if words.startswith(opening):
            self._buffer = words[len(opening) :]
        elif opening.startswith(words):
            return False
        elif not self._begins_within:
            self._step = self._answer
            return True
        self._step, self._skips_space = self._think, True
        return True

    def _think(self) -> bool:
        """Read thoughts, holding back the beginning of the closing tag, and space."""
        thoughts, tag, answer = self._buffer.partition(self._tags.closing)
        if tag:
            self._give(Reasoning, thoughts.rstrip())
            self._buffer, self._step, self._skips_space = answer, self._answer, True
            return True
        thoughts = self._buffer[: len(self._buffer) - held_back(self._buffer, (self._tags.closing,))].rstrip()
        self._buffer = self._buffer[len(thoughts) :]
        self._give(Reasoning, thoughts)
        return False

    def _answer(self) -> bool:
        self._give(Content, self._buffer)
        self._buffer = ""
        return True

    def _give(self, kind: type[Reasoning | Content], text: str) -> None:
        if self._skips_space:
            text = text.lstrip()
        if text:
            self._skips_space = False
            self._pieces.append(kind(text))
