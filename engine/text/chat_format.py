"""How the served model converses: how it writes calls of tools and thoughts, and what its chat template can be told.

Resolved once at start-up from the template and two settings, then read by the event loop. A MessageReader, one a choice,
takes the text of an answer apart. Knows text, no HTTP and no tokens but the ids of a few special ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.core.errors import ConfigError
from engine.text.channels import MARKS, ChannelSplitter, speaks_in_channels
from engine.text.detokenizer import Tokenizer
from engine.text.reasoning import REASONING_TAGS, ReasoningSplitter, ReasoningTags, detect_reasoning
from engine.text.roles import ALL_ROLES, KnownRoles
from engine.text.thinking import TagIds
from engine.text.tools.dialects import DIALECTS, HARMONY, HERMES, detect_dialect, parser_of
from engine.text.tools.parser import Dialect, ToolParser
from engine.text.tools.pieces import Content, Piece
from engine.text.tools.xml_parser import XmlToolParser

logger = logging.getLogger(__name__)

_THINKING_SWITCHES = ("enable_thinking", "thinking")
_EFFORT_SWITCH = "reasoning_effort"


class MessageReader:
    """push text as it comes, finish at its end; thoughts first, and only in what is none of them calls are found."""

    def __init__(
        self, splitter: ReasoningSplitter | ChannelSplitter | None, parser: ToolParser | XmlToolParser | None
    ) -> None:
        self._splitter = splitter
        self._parser = parser

    @property
    def is_reasoning(self) -> bool:
        """True if what comes next is thoughts."""
        return self._splitter is not None and self._splitter.is_reasoning

    def push(self, text: str) -> list[Piece]:
        """What is certain now."""
        return self._find_calls([Content(text)] if self._splitter is None else self._splitter.push(text))

    def finish(self) -> list[Piece]:
        """What was held back. Ends the text."""
        pieces = self._find_calls([] if self._splitter is None else self._splitter.finish())
        return pieces if self._parser is None else pieces + self._parser.finish()

    def _find_calls(self, pieces: list[Piece]) -> list[Piece]:
        if self._parser is None:
            return pieces
        found: list[Piece] = []
        for piece in pieces:
            found += self._parser.push(piece.text) if isinstance(piece, Content) else [piece]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """What is known of a model's manner. The default is one that has no template."""

    dialect: Dialect | None = HERMES  # how its calls are read
    calls_stay_text: bool = False  # nobody wants them read
    shows_tools: bool = False  # its template does; else they are described in the system message
    tags: ReasoningTags | None = None
    has_channels: bool = False  # thoughts, words and calls are told apart by engine/text/channels.py
    roles: KnownRoles = ALL_ROLES
    switches: frozenset[str] = frozenset()  # what its template can be told about reasoning
    tag_ids: TagIds | None = None  # of the tags, if each is one token
    hidden_ids: frozenset[int] | None = None  # special tokens that are no mark, if any mark is one

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, tool_call_parser: str = "auto", reasoning_parser: str = "auto") -> ChatFormat:
        """Detect the format from the chat template, or take the parsers that the settings name. Raises ConfigError."""
        template = tokenizer.chat_template
        source = template.source if template else ""
        variables = template.variables if template else frozenset[str]()
        shows_tools = "tools" in variables
        dialect = _choose_dialect(tool_call_parser, source, shows_tools=shows_tools)
        detected = detect_reasoning(source) if reasoning_parser == "auto" else None
        tags = REASONING_TAGS.get(reasoning_parser, detected)
        has_channels = reasoning_parser in ("auto", HARMONY.name) and speaks_in_channels(source)
        if dialect is HARMONY and not has_channels:
            raise ConfigError(
                f"Calls are read as in {HARMONY.name}, where the channels tell them, but --reasoning-parser is "
                f"{reasoning_parser} and the chat template {'has' if speaks_in_channels(source) else 'has no'} channels; "
                "leave both parsers at auto, or set --tool-call-parser none."
            )
        chat_format = cls(
            dialect=dialect,
            calls_stay_text=tool_call_parser == "none",
            shows_tools=shows_tools,
            tags=tags,
            has_channels=has_channels,
            roles=KnownRoles.of(tokenizer),
            tag_ids=_tag_ids(tokenizer, tags),
            switches=variables & {*_THINKING_SWITCHES, _EFFORT_SWITCH},
            hidden_ids=_hidden_ids(tokenizer, dialect, tags, MARKS if has_channels else ()),
        )
        if template:
            logger.info("%s", chat_format.describe())
        return chat_format

    def describe(self) -> str:
        """One line for the log."""
        how = "are told from the text as in " + self.dialect.name if self.dialect else "stay text"
        if not self.shows_tools:
            how += ", tools described in the system message (the chat template has no place for them)"
        elif self.dialect is None and not self.calls_stay_text:
            how = "are written in a way not known here; name one with --tool-call-parser"
        return f"calls of tools {how}; reasoning {self._thoughts()}"

    def _thoughts(self) -> str:
        if self.has_channels:
            return "in channels"
        return f"as in {self.tags.name}" if self.tags else "is not expected"

    @property
    def expects_thoughts(self) -> bool:
        """True if answers may have thoughts that are separated from the words."""
        return self.tags is not None or self.has_channels

    @property
    def takes_effort(self) -> bool:
        """Whether there is a way to make the model think more or less."""
        return bool(self.switches) or self.tag_ids is not None

    def template_kwargs(self, effort: str | None) -> dict[str, Any]:
        """What the template is told about an effort."""
        if effort is None:
            return {}
        told: dict[str, Any] = dict.fromkeys(self.switches & set(_THINKING_SWITCHES), effort != "none")
        return told | ({_EFFORT_SWITCH: effort} if _EFFORT_SWITCH in self.switches else {})

    def knows_effort(self, effort: str) -> bool:
        """True if telling the template of an effort is all there is to do."""
        return _EFFORT_SWITCH in self.switches or (effort == "none" and bool(self.switches))

    def has_thought(self, prompt: str) -> bool:
        """True if the prompt ends with thoughts that are over: the template was told that there shall be none."""
        return self.tags is not None and prompt.rstrip().endswith(self.tags.closing)

    def reader(
        self, dialect: Dialect | None, tools: Mapping[str, Mapping[str, Any]], *, begins_within: bool
    ) -> Callable[[], MessageReader]:
        """Return a factory that makes a reader for each choice of an answer."""
        tags = self.tags

        def make() -> MessageReader:
            if self.has_channels:
                reads_calls = dialect is HARMONY
                parser = None if reads_calls or dialect is None else parser_of(dialect, tools)
                return MessageReader(ChannelSplitter(reads_calls=reads_calls), parser)
            splitter = None if tags is None else ReasoningSplitter(tags, begins_within=begins_within)
            return MessageReader(splitter, None if dialect is None else parser_of(dialect, tools))

        return make


def _choose_dialect(asked: str, source: str, *, shows_tools: bool) -> Dialect | None:
    if asked == "none":
        return None
    if shows_tools:
        return DIALECTS.get(asked) or detect_dialect(source)
    if asked not in ("auto", HERMES.name):
        raise ConfigError(
            f"--tool-call-parser is {asked}, but the chat template has no place for tools, so they are introduced in "
            f"{HERMES.name}' way; leave it out, or give a template with --chat-template."
        )
    return HERMES


def _tag_ids(tokenizer: Tokenizer, tags: ReasoningTags | None) -> TagIds | None:
    if tags is None:
        return None
    opening, closing = (tokenizer.encode(tag, add_special_tokens=False) for tag in (tags.opening, tags.closing))
    return TagIds(opening[0], closing[0]) if len(opening) == len(closing) == 1 else None


def _hidden_ids(
    tokenizer: Tokenizer, dialect: Dialect | None, tags: ReasoningTags | None, more: Sequence[str]
) -> frozenset[int] | None:
    """A mark that is a special token must reach the text, though special tokens do not; the others then go by id."""
    marks = {mark for pair in dialect.marks for mark in pair} | {dialect.name_end} if dialect else set()
    marks |= {*more}
    if tags is not None:
        marks |= {tags.opening, tags.closing}
    special = tokenizer.special_tokens
    if not marks & special.keys():
        return None
    return frozenset(token_id for token, token_id in special.items() if token not in marks)
