"""The base of tool-call formats: signs, markup, parser and grammars. Pure.

To add a format, write one file with a ToolFormat, and its line in formats.py.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.text.grammars.spec import close_schema, drop_annotations
from engine.text.types import CallArguments, CallBegin, Content, Piece, PieceParser, first_of, held_back

Tools = Mapping[str, Mapping[str, Any]]  # the schema of the parameters, by the tool's name

MAX_CALLS = 16  # of one answer that a grammar makes
SPACE = r"[ \t\r\n]{0,20}"  # a regex
# JSON as models are shown it: one space after a comma and a colon.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_BETWEEN = {"whitespace_pattern": r"[\x20\x09\x0A\x0D]{0,40}"}  # between the JSON tokens of a call in free text
OPEN_ENDED = ("additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf")


Message = Mapping[str, Any]  # as chat templates get it


class OfferedTool(NamedTuple):
    """A tool that an answer may call."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False

    def arguments(self, options: Mapping[str, Any]) -> str:
        """Return Lark for arguments that are valid against the schema.

        Keywords that cannot be enforced are refused if the tool is strict, and left out otherwise. A schema that does
        not mention further properties has none, because a small model would write them without end; so a tool without
        a schema has no arguments.
        """
        schema: dict[str, Any] = {"type": "object", **self.parameters}
        if not any(key in schema for key in OPEN_ENDED):
            schema["additionalProperties"] = False
        return embedded(close_schema(schema) if self.strict else schema, **options, lenient=not self.strict)

    def free_arguments(self) -> str:
        """Return Lark for arguments in free text: any object, or the strict schema's."""
        return self.arguments(_BETWEEN) if self.strict else embedded({"type": "object"})


def embedded(schema: Mapping[str, Any], **options: Any) -> str:
    """Return Lark that embeds a schema, with text that looks like GBNF escaped."""
    whole = {**drop_annotations(schema), "x-guidance": options or _BETWEEN}
    return "%json " + json.dumps(whole).replace("::=", ":\\u003a=")


def literal(mark: str, special_tokens: Mapping[str, int]) -> str:
    """Return Lark for a mark, which may be a token that no text spells."""
    return f"<[{special_tokens[mark]}]>" if mark in special_tokens else json.dumps(mark)


def any_of(rule: str, num: int) -> str:
    """Return Lark for one of the rules `rule_0`, `rule_1`, ..."""
    return " | ".join(f"{rule}_{index}" for index in range(num))


def free_text(opening: str, special_tokens: Mapping[str, int], *, parallel: bool) -> list[str]:
    """Return Lark for free text in which the rule `calls` follows each opening mark."""
    is_token = opening in special_tokens
    return [
        f"start: tagged{'*' if parallel else '?'} TEXT",
        "TEXT: /(?s:.*)/",
        f"opened{'' if is_token else '[lazy]'}: TEXT {literal(opening, special_tokens)}",
        "tagged: opened calls",
    ]


def repeated(rule: str, between: str, more: int) -> str:
    """Return Lark for a rule, and up to `more` of it after the text `between`."""
    return f"{rule} ({json.dumps(between) + ' ' if between else ''}{rule}){{0,{more}}}" if more else rule


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ToolFormat(ABC):
    """How a family of models writes calls."""

    name: str
    aliases: tuple[str, ...] = ()  # further names of the setting
    signs: tuple[str, ...] = ()  # texts of every chat template that teaches the format; none: it is not detected
    id_length: int = 0  # of a call's id, where templates insist on one
    openings: tuple[str, ...] = ()  # the marks that begin calls
    inner: tuple[str, ...] = ()  # further marks, within calls and behind them
    ends_thoughts: bool = False  # such a mark ends thoughts that were not closed
    may_answer_instead: bool = True  # text that begins as JSON is no call
    introduction: str = ""  # describes `{tools}` where the template shows calls, but no tools

    def is_taught_by(self, template: str) -> bool:
        """Return True if a chat template uses this format."""
        return bool(self.signs) and all(sign in template for sign in self.signs)

    @property
    def markup(self) -> frozenset[str]:
        """The texts around calls; those that are special tokens are shown to the parser."""
        return frozenset((*self.openings, *self.inner))

    @abstractmethod
    def parser(self, tools: Tools) -> PieceParser:
        """Return a parser of one answer that may call these tools."""

    @abstractmethod
    def grammar(self, tools: Sequence[OfferedTool], special_tokens: Mapping[str, int], *, parallel: bool) -> str:
        """Return Lark for free text with calls in it, valid ones of strict tools.

        Raises InvalidRequestError for a schema that cannot be enforced. llguidance's structural tags do not suffice: a
        tag begins with one literal text, its number is not bounded, and a call needs a mark.
        """

    def forced(
        self,
        tools: Sequence[OfferedTool],  # noqa: ARG002 - not every format has such a grammar
        special_tokens: Mapping[str, int],  # noqa: ARG002
        *,
        max_calls: int,  # noqa: ARG002
    ) -> list[str] | None:
        """Return Lark whose rule `calls` is nothing but calls, or None without such a grammar.

        Raises InvalidRequestError for a schema that cannot be enforced in this format.
        """
        return None

    @property
    def spells_calls(self) -> bool:
        """True if the format can write earlier calls itself."""
        return False

    def spelled(self, calls: Sequence[Message]) -> str:
        """Return earlier calls as text, for templates that leave them out."""
        raise NotImplementedError

    def fit(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages as the templates of this format want them."""
        return messages


def with_ids(messages: Sequence[Message], new_id: Callable[[Message, int], str]) -> list[Message]:
    """Return the messages with the ids that `new_id` makes of a call and its number."""
    fitted: list[Message] = []
    names: dict[Any, str] = {}  # the new ids by the old ones
    num_calls = 0
    for message in messages:
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                names[call["id"]] = new_id(call, num_calls)
                calls.append({**call, "id": names[call["id"]]})
                num_calls += 1
            message = {**message, "tool_calls": calls}
        elif message.get("tool_call_id") in names:
            message = {**message, "tool_call_id": names[message["tool_call_id"]]}
        fitted.append(message)
    return fitted


class CallParser(PieceParser):
    """Base of parsers that find calls behind marks; other text is content, unchanged."""

    _stops: tuple[str, ...] = ()  # marks that end faulty arguments, and are not read with them

    def __init__(self, openings: tuple[str, ...]) -> None:
        super().__init__(self._text)
        self._openings = openings
        self._closing = ""  # the mark that may end the current calls
        self._held = ""  # read since the last call or content: markup if a call follows, content if not
        self._has_called = False
        self._is_fresh = True  # neither a mark nor content so far, but for space

    def finish(self) -> list[Piece]:
        if self._step == self._broken:
            self._arguments(self._buffer)
            self._buffer = ""
        rest = self._held + self._buffer
        is_cut_mark = self._step == self._after and self._is_part_of_mark(rest.strip())
        if not (self._has_called and (is_cut_mark or not rest.strip())):
            self._content(rest)
        self._buffer = self._held = ""
        return self._take()

    def _is_part_of_mark(self, text: str) -> bool:
        """Return True if more text may complete a mark that can follow a call."""
        return self._closing.startswith(text)

    def _opened(self, mark: str) -> None:
        """Choose the step that reads the text after an opening mark."""
        raise NotImplementedError

    def _text(self) -> bool:
        """Read content up to a mark, holding back space, which may belong to the mark."""
        buffer = self._buffer
        found = first_of(buffer, self._openings)
        if found is None:
            certain = buffer[: len(buffer) - held_back(buffer, self._openings)].rstrip()
            self._content(certain)
            self._buffer = buffer[len(certain) :]
            return False
        at, mark = found
        before = buffer[:at].rstrip()
        self._content(before)
        self._buffer = buffer[len(before) :]
        self._hold(at - len(before) + len(mark))
        self._opened(mark)
        return True

    def _after(self) -> bool:
        """Read the text after a call: the closing mark, or content."""
        self._skip_space()
        if self._closing and self._buffer.startswith(self._closing):
            self._held, self._buffer = "", self._buffer[len(self._closing) :]
            self._step = self._text
            return True
        return not self._closing.startswith(self._buffer) and self._no_call()

    def _closings(self) -> tuple[str, ...]:
        """Return the marks that end faulty arguments, and are read with them."""
        return (self._closing,) if self._closing else ()

    def _broken(self) -> bool:
        """Read the text after a fault in arguments, up to the next mark."""
        closings = self._closings()
        marks = (*self._stops, *closings)
        at, mark = first_of(self._buffer, marks) or (len(self._buffer) - held_back(self._buffer, marks), "")
        self._arguments(self._buffer[:at])
        self._buffer = self._buffer[at + (len(mark) if mark in closings else 0) :]
        if mark:
            self._step = self._text
        return bool(mark)

    def _no_call(self) -> bool:
        """Make content of the held text; space may belong to the next mark."""
        held, self._held = self._held, ""
        self._step = self._text
        if held.strip():
            self._content(held)
        else:
            self._buffer = held + self._buffer
        return True

    def _begin(self, name: str, call_id: str = "") -> None:
        """Begin a call: the held text is its markup."""
        self._held, self._has_called = "", True
        self._pieces.append(CallBegin(name, call_id))

    def _content(self, text: str) -> None:
        if text:
            self._is_fresh = False
            self._pieces.append(Content(text))

    def _arguments(self, text: str) -> None:
        if self._pieces and isinstance(last := self._pieces[-1], CallArguments):
            self._pieces[-1] = CallArguments(last.text + text)
        elif text:
            self._pieces.append(CallArguments(text))

    def _skip_space(self) -> str:
        """Hold space and return the character after it."""
        self._hold(len(self._buffer) - len(self._buffer.lstrip()))
        return self._buffer[:1]

    def _hold(self, num_chars: int) -> None:
        self._held, self._buffer = self._held + self._buffer[:num_chars], self._buffer[num_chars:]
