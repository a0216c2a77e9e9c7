"""The formatter of /v1/messages: a message of blocks, or events. Pure data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic_core import from_json

from engine.core.types import FinishReason
from engine.text.choice import Delta
from engine.text.tools.formats import new_call_id
from engine.text.types import CallArguments, CallBegin, Content, Piece, Reasoning
from server.errors import ApiError
from server.http.bodies import ResponseBody
from server.openai.formatter import ChunkMeta, frame
from server.openai.translated import pieces_of
from server.openai.usage import Usage
from server.telemetry.timeline import AnswerMetrics


class MessageUsage(ResponseBody):
    """The token counts; cached and newly retained prompt tokens are apart."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> MessageUsage:
        cached = usage.prompt_tokens_details.cached_tokens
        created = max((usage.prompt_tokens_details.pinned_tokens or 0) - cached, 0)
        return cls(
            input_tokens=usage.prompt_tokens - cached - created,
            cache_creation_input_tokens=created,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
        )


class ContentBlock(ResponseBody):
    """Text, thinking or a tool's use; its fields depend on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class AnthropicMessage(ResponseBody):
    """The answer; a stream begins with an empty one."""

    id: str
    type: str
    role: str
    model: str
    content: list[ContentBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class AnthropicErrorDetails(ResponseBody):
    type: str
    message: str


class AnthropicError(ResponseBody):
    """Anthropic's envelope of an error, as server/errors.py writes it."""

    type: str
    error: AnthropicErrorDetails
    request_id: str


class MessageEvent(ResponseBody):
    """One event of a stream; its fields depend on its type."""

    type: str
    message: AnthropicMessage | None = None
    index: int | None = None
    content_block: ContentBlock | None = None
    delta: dict[str, str | None] | None = None
    usage: MessageUsage | None = None


class MessageFormatter:
    """Implements ResponseFormatter; a plain answer is a stream's state at its end."""

    def __init__(self, meta: ChunkMeta, *, call_id_length: int) -> None:
        self._meta = meta
        self._call_id_length = call_id_length
        self._blocks: list[ContentBlock] = []
        self._is_open = False
        self._texts: list[str] = []  # of the open block
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def answer(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        self._add(deltas[0])
        self._close()
        return self._message(self._blocks, usage).json_bytes()

    def opening(self) -> bytes:
        begun = Usage.of(sum(map(len, self._meta.prompts)), 0)  # the cached tokens are reported at the end
        start = MessageEvent(type="message_start", message=self._message([], begun))
        return _frames([start, MessageEvent(type="ping")])

    def news(self, news: Sequence[tuple[int, Delta]], usage: Callable[[], Usage]) -> bytes:  # noqa: ARG002 - at the end
        return _frames([event for _, delta in news for event in self._add(delta)])

    def closing(self, usage: Usage, metrics: AnswerMetrics | None) -> bytes:  # noqa: ARG002 - of chat
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        end = MessageEvent(type="message_delta", delta=delta, usage=MessageUsage.of(usage))
        return _frames([*self._close(), end, MessageEvent(type="message_stop")])

    def failure(self, error: ApiError) -> bytes:
        return frame(error.anthropic_body(), "error")

    def _message(self, content: Sequence[ContentBlock], usage: Usage) -> AnthropicMessage:
        return AnthropicMessage(
            id=f"{self._meta.id_prefix}_{self._meta.answer_id}",
            type="message",
            role="assistant",
            model=self._meta.model,
            content=list(content),
            stop_reason=self._stop_reason,
            stop_sequence=self._stop_sequence,
            usage=MessageUsage.of(usage),
        )

    def _add(self, delta: Delta) -> list[MessageEvent]:
        events: list[MessageEvent] = []
        for piece in pieces_of(delta):
            if not self._fits(piece):
                events += [*self._close(), self._begin(piece)]
            if not isinstance(piece, CallBegin):
                events.append(self._grow(piece))
        if delta.finish_reason is not None:
            self._end(delta)
        return events

    def _end(self, delta: Delta) -> None:
        if delta.finish_reason is FinishReason.LENGTH:
            self._stop_reason = "max_tokens"
        elif isinstance(delta.stop_reason, str):
            self._stop_reason, self._stop_sequence = "stop_sequence", delta.stop_reason
        else:
            self._stop_reason = "tool_use" if delta.has_called else "end_turn"

    def _fits(self, piece: Piece) -> bool:
        """Return whether a piece continues the open block."""
        if not self._is_open or isinstance(piece, CallBegin):
            return False
        kinds = {Content: "text", Reasoning: "thinking", CallArguments: "tool_use"}
        return self._blocks[-1].type == kinds[type(piece)]

    def _begin(self, piece: Piece) -> MessageEvent:
        if isinstance(piece, CallBegin):
            name = new_call_id("toolu_", self._call_id_length)
            block = ContentBlock(type="tool_use", id=name, name=piece.name, input={})
        elif isinstance(piece, Reasoning):
            block = ContentBlock(type="thinking", thinking="", signature="")
        else:
            block = ContentBlock(type="text", text="")
        self._is_open = True
        self._blocks.append(block)
        return MessageEvent(type="content_block_start", index=self._index, content_block=block.model_copy())

    def _grow(self, piece: Content | Reasoning | CallArguments) -> MessageEvent:
        self._texts.append(piece.text)
        if isinstance(piece, CallArguments):
            delta: dict[str, str | None] = {"type": "input_json_delta", "partial_json": piece.text}
        elif isinstance(piece, Reasoning):
            delta = {"type": "thinking_delta", "thinking": piece.text}
        else:
            delta = {"type": "text_delta", "text": piece.text}
        return MessageEvent(type="content_block_delta", index=self._index, delta=delta)

    def _close(self) -> list[MessageEvent]:
        if not self._is_open:
            return []
        block, text = self._blocks[-1], "".join(self._texts)
        if block.type == "tool_use":
            block.input = _arguments(text)
        elif block.type == "thinking":
            block.thinking = text
        else:
            block.text = text
        self._is_open, self._texts = False, []
        return [MessageEvent(type="content_block_stop", index=self._index)]

    @property
    def _index(self) -> int:
        return len(self._blocks) - 1


def _frames(events: Sequence[MessageEvent]) -> bytes:
    return b"".join([frame(event.json_bytes(), event.type) for event in events])


def _arguments(text: str) -> dict[str, Any]:
    """Return the input that a model wrote, as far as it came.

    Input that is not an object is under the name "invalid_json".
    """
    try:
        arguments = from_json(text or "{}", allow_partial=True)
    except ValueError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"invalid_json": text}
