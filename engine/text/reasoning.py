"""Separates thoughts between tags like <think> and </think> from the answer.

Space around the tags belongs to them. A text that does not begin with thoughts has none: a later tag is text. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from engine.text.types import Content, Piece, PieceParser, Reasoning, first_of, held_back


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningTags:
    """How a family of models marks its thoughts."""

    name: str
    opening: str
    closing: str
    label: str = ""  # a word behind the opening tag that belongs to it
    aliases: tuple[str, ...] = ()  # further names of the setting
    also: tuple[tuple[str, str], ...] = ()  # further pairs of an opening and its closing tag
    signs: tuple[tuple[str, ...], ...] = ()  # sets of texts of which a template has one, if not just the closing tag
    answer: tuple[str, str] = ("", "")  # tags that may be around the answer after thoughts
    always: bool = False  # an answer begins with thoughts even without the opening tag

    @property
    def openings(self) -> tuple[str, ...]:
        """All tags that begin thoughts."""
        return (self.opening, *dict.fromkeys(opening for opening, _ in self.also))

    def closings(self, opening: str) -> tuple[str, ...]:
        """Return the tags that end thoughts after an opening tag."""
        pairs = ((self.opening, self.closing), *self.also)
        return tuple(closing for begin, closing in pairs if begin == opening)

    def is_taught_by(self, template: str) -> bool:
        """Return True if a chat template uses these tags."""
        signs = self.signs or ((self.closing,),)
        return any(all(sign in template for sign in each) for each in signs)

    def begins_within(self, prompt: str, continued: str = "") -> bool:
        """Return True if the prompt or the continued message has opened thoughts."""
        end = prompt.rstrip()
        if continued.rfind(self.opening) > continued.rfind(self.closing) or end.endswith(self.opening):
            return True
        return self.always and self.closing not in continued and not end.endswith(self.closing)


_GRANITE = (
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
# In the order of detection: Granite has the tags of Qwen3 around thoughts, and others around the answer.
_TAGS = (
    ReasoningTags(
        name="granite",
        opening=_GRANITE[0][0],
        closing=_GRANITE[1][0],
        also=(*list(product(*_GRANITE))[1:], ("<think>", "</think>")),
        signs=((_GRANITE[1][0],), ("<|start_of_role|>", "</response>")),
        answer=("<response>", "</response>"),
    ),
    ReasoningTags(
        name="qwen3",
        aliases=("deepseek_v3", "glm45", "glm47", "kimi_k2", "olmo3"),
        opening="<think>",
        closing="</think>",
    ),
    ReasoningTags(name="deepseek_r1", opening="<think>", closing="</think>", always=True),
    ReasoningTags(name="mistral", opening="[THINK]", closing="[/THINK]"),
    ReasoningTags(name="gemma4", opening="<|channel>", closing="<channel|>", label="thought"),
)
REASONING_TAGS = {name: tags for tags in _TAGS for name in (tags.name, *tags.aliases)}


def detect_reasoning(template: str) -> ReasoningTags | None:
    """Return the tags that a chat template mentions."""
    return next((tags for tags in _TAGS if tags.is_taught_by(template)), None)


class ReasoningParser(PieceParser):
    """`push` text as it arrives, `finish` at its end."""

    def __init__(self, tags: ReasoningTags, *, begins_within: bool, enders: tuple[str, ...] = ()) -> None:
        """`enders` are marks of calls, which end thoughts that were not closed."""
        super().__init__(self._begin)
        self._tags = tags
        self._begins_within = begins_within
        self._enders = enders
        self._closings = tags.closings(tags.opening)
        self._wrapper = ""  # the tag that ends the answer
        self._skips_space = False  # the next text follows a tag

    @property
    def is_reasoning(self) -> bool:
        """True if the next text is thoughts."""
        return self._step in (self._think, self._labelled) or (self._begins_within and self._step == self._begin)

    def finish(self) -> list[Piece]:
        if self.is_reasoning:
            self._give(Reasoning, self._buffer.rstrip())
        else:
            self._give(Content, self._buffer)
        self._buffer = ""
        return self._take()

    def _begin(self) -> bool:
        """Decide whether the text begins with thoughts, as soon as that is certain."""
        words = self._buffer.lstrip()
        opening = next(filter(words.startswith, self._tags.openings), None)
        if opening is not None:
            self._buffer, self._closings = words[len(opening) :], self._tags.closings(opening)
        elif any(tag.startswith(words) for tag in self._tags.openings):
            return False
        elif not self._begins_within:
            self._step = self._answer
            return True
        self._step = self._labelled if self._tags.label and opening is not None else self._think
        self._skips_space = True
        return True

    def _labelled(self) -> bool:
        """Read the word behind the opening tag."""
        words, label = self._buffer.lstrip(), self._tags.label
        if len(words) < len(label) and label.startswith(words):
            return False
        self._buffer, self._step = words.removeprefix(label), self._think
        return True

    def _think(self) -> bool:
        """Read thoughts, holding back the beginning of the closing tag, and space."""
        marks = (*self._closings, *self._enders)
        found = first_of(self._buffer, marks)
        if found is not None:
            at, mark = found
            self._give(Reasoning, self._buffer[:at].rstrip())
            self._buffer = self._buffer[at + (0 if mark in self._enders else len(mark)) :]
            self._step, self._skips_space = self._wrapped if self._tags.answer[0] else self._answer, True
            return True
        thoughts = self._buffer[: len(self._buffer) - held_back(self._buffer, marks)].rstrip()
        self._buffer = self._buffer[len(thoughts) :]
        self._give(Reasoning, thoughts)
        return False

    def _wrapped(self) -> bool:
        """Read the tag before the answer, if it has one."""
        words, (opening, closing) = self._buffer.lstrip(), self._tags.answer
        if words.startswith(opening):
            self._buffer, self._wrapper = words[len(opening) :], closing
        elif opening.startswith(words):
            return False
        self._step = self._answer
        return True

    def _answer(self) -> bool:
        """Read the answer, without the tag that ends it."""
        text, tag, rest = self._buffer.partition(self._wrapper) if self._wrapper else (self._buffer, "", "")
        if tag:
            self._give(Content, text.rstrip())
            self._buffer, self._wrapper = rest, ""
            return True
        if self._wrapper:
            text = text[: len(text) - held_back(text, (self._wrapper,))].rstrip()
        self._give(Content, text)
        self._buffer = self._buffer[len(text) :]
        return not self._buffer

    def _give(self, kind: type[Reasoning | Content], text: str) -> None:
        if self._skips_space:
            text = text.lstrip()
        if text:
            self._skips_space = False
            self._pieces.append(kind(text))
