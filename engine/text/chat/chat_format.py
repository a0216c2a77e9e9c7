"""The served model's chat format: tool calls, thoughts, template switches.

Detected once at start-up from the template and two settings, then only read. A MessageParser, one for each choice,
separates the text of an answer into content, thoughts and calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.core.errors import ConfigError
from engine.core.types import TagIds
from engine.text.channels import CHANNEL_NAMES, MARKS, ChannelParser
from engine.text.message_fallbacks import (
    ALL_CALLS,
    ALL_ROLES,
    EarlierCalls,
    KnownRoles,
    introduce_tools,
    needs_descriptions,
    put_calls_in_content,
    spell_out_tools,
)
from engine.text.reasoning import REASONING_TAGS, ReasoningParser, ReasoningTags, detect_reasoning
from engine.text.tokenizer import TextTokenizer
from engine.text.tools.formats import TOOL_FORMATS, detect_tool_format
from engine.text.tools.harmony import HARMONY
from engine.text.tools.json_calls import HERMES
from engine.text.tools.tool_format import Message, ToolFormat, Tools
from engine.text.types import Content, Piece, PieceParser

logger = logging.getLogger(__name__)

_THINKING_SWITCHES = ("enable_thinking", "thinking")
_EFFORT_SWITCH = "reasoning_effort"


class MessageParser:
    """`push` text, `finish` at its end. Thoughts come first, calls in the rest."""

    def __init__(self, thoughts: ReasoningParser | ChannelParser | None, calls: PieceParser | None) -> None:
        self._thoughts = thoughts
        self._calls = calls

    @property
    def is_reasoning(self) -> bool:
        """True if the next text is thoughts."""
        return self._thoughts is not None and self._thoughts.is_reasoning

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that are certain now."""
        return self._find_calls([Content(text)] if self._thoughts is None else self._thoughts.push(text))

    def finish(self) -> list[Piece]:
        """Return what was held back. Ends the text."""
        pieces = self._find_calls([] if self._thoughts is None else self._thoughts.finish())
        return pieces if self._calls is None else pieces + self._calls.finish()

    def _find_calls(self, pieces: list[Piece]) -> list[Piece]:
        if self._calls is None:
            return pieces
        found: list[Piece] = []
        for piece in pieces:
            found += self._calls.push(piece.text) if isinstance(piece, Content) else [piece]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """The chat format of a model. The default is that of a model without a template."""

    tool_format: ToolFormat | None = HERMES  # how its calls are read
    calls_stay_text: bool = False  # calls are not read: --tool-call-parser none
    shows_tools: bool = False  # its template has a section for tools; else the system message describes them
    tags: ReasoningTags | None = None
    has_channels: bool = False  # engine/text/channels.py separates thoughts, content and calls
    roles: KnownRoles = ALL_ROLES
    earlier_calls: EarlierCalls = ALL_CALLS
    needs_descriptions: bool = False  # its template refuses tools without one
    switches: frozenset[str] = frozenset()  # the template's variables about reasoning
    tag_ids: TagIds | None = None  # of the tags, if each is one token
    hidden_ids: frozenset[int] | None = None  # special tokens that are not a mark, if any mark is a special token

    @classmethod
    def of(
        cls, tokenizer: TextTokenizer, *, tool_call_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> ChatFormat:
        """Return the format of the template and the settings. Raises ConfigError."""
        template = tokenizer.chat_template
        source = template.source if template else ""
        variables = template.variables if template else frozenset[str]()
        shows_tools = "tools" in variables
        tool_format = _choose_tool_format(tool_call_parser, tokenizer, source, shows_tools=shows_tools)
        detected = detect_reasoning(source) if reasoning_parser == "auto" else None
        tags = REASONING_TAGS.get(reasoning_parser, detected)
        has_channels = reasoning_parser in ("auto", *CHANNEL_NAMES) and HARMONY.is_taught_by(source)
        if tool_format is HARMONY and not has_channels:
            raise ConfigError(
                f"Calls are read as in {HARMONY.name}, where the channels tell them, but --reasoning-parser is "
                f"{reasoning_parser} and the chat template {'has' if HARMONY.is_taught_by(source) else 'has no'} channels; "
                "leave both parsers at auto, or set --tool-call-parser none."
            )
        return cls(
            tool_format=tool_format,
            calls_stay_text=tool_call_parser == "none",
            shows_tools=shows_tools,
            tags=tags,
            has_channels=has_channels,
            roles=KnownRoles.of(template),
            earlier_calls=EarlierCalls.of(template),
            needs_descriptions=shows_tools and needs_descriptions(template),
            tag_ids=_tag_ids(tokenizer, tags),
            switches=variables & {*_THINKING_SWITCHES, _EFFORT_SWITCH},
            hidden_ids=_hidden_ids(tokenizer, tool_format, tags, has_channels=has_channels),
        )

    def describe(self) -> str:
        """Return one line for the log."""
        calls = f"{self.tool_format.name} format" if self.tool_format else "not parsed"
        if not self.shows_tools:
            calls += ", tools listed in the system message (the template has no tool section)"
        elif self.tool_format is None and not self.calls_stay_text:
            calls = "unknown format; name one with --tool-call-parser"
        thoughts = "in channels" if self.has_channels else f"{self.tags.name} tags" if self.tags else "none"
        return f"tool calls: {calls}; reasoning: {thoughts}"

    def fit(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]]]:
        """Return the messages and tools as the template can show them."""
        messages, tool_format = self.roles.fit(messages), self.tool_format
        introduction = tool_format.introduction if tool_format is not None else ""
        if not (self.shows_tools or introduction):
            return spell_out_tools(messages, tools, HERMES.spelled), []
        if tool_format is not None:
            messages = tool_format.fit(messages)
            if not self.earlier_calls.are_shown and tool_format.spells_calls:
                messages = put_calls_in_content(messages, tool_format.spelled)
        messages = self.earlier_calls.fit(messages)
        if not self.shows_tools:
            return introduce_tools(messages, tools, introduction), []
        if self.needs_descriptions:
            tools = [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]
        return messages, tools

    @property
    def takes_effort(self) -> bool:
        """True if the model can be made to think more or less."""
        return bool(self.switches) or self.tag_ids is not None

    def template_kwargs(self, effort: str) -> dict[str, Any]:
        """Return the template's variables for a reasoning effort."""
        variables: dict[str, Any] = dict.fromkeys(self.switches & set(_THINKING_SWITCHES), effort != "none")
        return variables | ({_EFFORT_SWITCH: effort} if _EFFORT_SWITCH in self.switches else {})

    def knows_effort(self, effort: str) -> bool:
        """Return True if the template implements an effort."""
        return _EFFORT_SWITCH in self.switches or (effort == "none" and bool(self.switches))

    def has_thought(self, prompt: str) -> bool:
        """Return True if the prompt ends with closed thoughts."""
        return self.tags is not None and prompt.rstrip().endswith(self.tags.closing)

    def parser_factory(
        self, tool_format: ToolFormat | None, tools: Tools, *, begins_within: bool
    ) -> Callable[[], MessageParser]:
        """Return a function that makes a parser for each choice of an answer."""

        def make() -> MessageParser:
            calls = None if tool_format is None else tool_format.parser(tools)
            if isinstance(calls, ChannelParser):  # which separates thoughts too
                return MessageParser(calls, None)
            if self.has_channels:
                return MessageParser(ChannelParser(reads_calls=False), calls)
            if self.tags is None:
                return MessageParser(None, calls)
            enders = tool_format.openings if tool_format is not None and tool_format.ends_thoughts else ()
            return MessageParser(ReasoningParser(self.tags, begins_within=begins_within, enders=enders), calls)

        return make


def _choose_tool_format(asked: str, tokenizer: TextTokenizer, source: str, *, shows_tools: bool) -> ToolFormat | None:
    """Return the format of calls: hermes where the template introduces no tools, and they cannot be in the one asked for."""
    if asked == "none":
        return None
    known = TOOL_FORMATS.get(asked) or detect_tool_format(source)
    if shows_tools:
        return known
    if known is not None and known.introduction and known.is_taught_by(source):
        num_tokens = max(len(tokenizer.encode(mark, add_special_tokens=False)) for mark in known.openings)
        if num_tokens == 1 or asked != "auto":  # distilled models have the template without the tokens
            return known
    if asked != "auto" and known is not HERMES:
        logger.warning(
            "--tool-call-parser %s has no effect: the chat template has no place for tools, so they are introduced, and calls "
            "read, in the format %s; give a template with --chat-template to change that",
            asked,
            HERMES.name,
        )
    return HERMES


def _tag_ids(tokenizer: TextTokenizer, tags: ReasoningTags | None) -> TagIds | None:
    if tags is None:
        return None
    opening, closing = (tokenizer.encode(tag, add_special_tokens=False) for tag in (tags.opening, tags.closing))
    return TagIds(opening[0], closing[0]) if len(opening) == len(closing) == 1 else None


def _hidden_ids(
    tokenizer: TextTokenizer, tool_format: ToolFormat | None, tags: ReasoningTags | None, *, has_channels: bool
) -> frozenset[int] | None:
    """Return the special tokens to hide, if a mark is one, which must be shown."""
    marks = {*MARKS} if has_channels else set[str]()
    if tool_format is not None:
        marks |= tool_format.markup
    if tags is not None:
        marks |= {tags.opening, tags.closing}
    special = tokenizer.special_tokens
    if not marks & special.keys():
        return None
    return frozenset(token_id for token, token_id in special.items() if token not in marks)
