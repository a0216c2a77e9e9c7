"""The formatter of /v1/messages: a message of blocks, or events. Pure data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import Field
from pydantic_core import from_json

from engine.core.types import FinishReason
from engine.text.chat.choice import Delta
from engine.text.tools.formats import new_call_id
from engine.text.types import CallBegin, Piece, Reasoning
from server.answers.formatter import ChunkMeta, frame
from server.openai.translated import PieceWriter
from server.protocol.documents import ResponseBody, Usage
from server.protocol.errors import ApiError
from server.telemetry.answer_metrics import AnswerMetrics

# A block's type -> the type and the field of its deltas.
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}

# Without one AI SDK does not send thoughts back, and Pydantic AI sends them as the user's words.
_SIGNATURE = "cXVpcmU="


class MessageUsage(ResponseBody):
    """The token counts; cached and newly retained prompt tokens are apart."""

    input_tokens: int = Field(description="Tokens of the prompt that were not cached.")
    cache_creation_input_tokens: int = Field(description="Tokens whose K/V was pinned by this request.")
    cache_read_input_tokens: int = Field(description="Tokens of the prompt whose K/V was found.")
    output_tokens: int = Field(description="Tokens generated, reasoning included.")

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

    type: str = Field(description="Which kind of object this is.")
    text: str | None = Field(None, description="The text.")
    thinking: str | None = Field(None, description="The reasoning's text.")
    signature: str | None = Field(None, description="Always the same; it may be sent back.")
    id: str | None = Field(None, description="The object's name; stored objects are found by it.")
    name: str | None = Field(None, description="Its name.")
    input: dict[str, Any] | None = Field(None, description="The arguments of the call.")


class AnthropicMessage(ResponseBody):
    """The answer; a stream begins with an empty one."""

    id: str = Field(description="The object's name; stored objects are found by it.")
    type: str = Field(description="Which kind of object this is.")
    role: str = Field(description="Who speaks.")
    model: str = Field(description="The model or adapter that answered.")
    content: list[ContentBlock] = Field(description="The text, or the parts.")
    stop_reason: str | None = Field(description="end_turn, max_tokens, stop_sequence, tool_use or refusal.")
    stop_sequence: str | None = Field(description="The stop string that ended the answer.")
    usage: MessageUsage = Field(description="How many tokens were read and generated.")


class AnthropicErrorDetails(ResponseBody):
    type: str = Field(description="Which kind of object this is.")
    message: str = Field(description="A sentence for people.")
    details: dict[str, str] | None = Field(None, description="error_code, for errors that Anthropic's SDKs act on.")


class AnthropicError(ResponseBody):
    """Anthropic's envelope of an error, as server/protocol/errors.py writes it."""

    type: str = Field(description="Which kind of object this is.")
    error: AnthropicErrorDetails = Field(description="Why it failed, or null.")
    request_id: str = Field(description="The request's name.")


class MessageEvent(ResponseBody):
    """One event of a stream; its fields depend on its type."""

    type: str
    message: AnthropicMessage | None = None
    index: int | None = None
    content_block: ContentBlock | None = None
    delta: dict[str, str | None] | None = None
    usage: MessageUsage | None = None


class MessageFormatter(PieceWriter[MessageEvent]):
    """Implements ResponseFormatter for /v1/messages."""

    def __init__(self, meta: ChunkMeta) -> None:
        super().__init__()
        self._meta = meta
        self._blocks: list[ContentBlock] = []
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def answer(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        self._add(deltas[0])
        self._end_block()
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
        return _frames([*self._end_block(), end, MessageEvent(type="message_stop")])

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
        if delta.finish_reason is FinishReason.LENGTH:
            self._stop_reason = "max_tokens"
        elif delta.finish_reason is FinishReason.CONTENT_FILTER:
            self._stop_reason = "refusal"
        elif delta.finish_reason is not None and isinstance(delta.stop_reason, str):
            self._stop_reason, self._stop_sequence = "stop_sequence", delta.stop_reason
        elif delta.finish_reason is not None:
            self._stop_reason = "tool_use" if delta.has_called else "end_turn"
        return self._write(delta)

    def _begin(self, piece: Piece) -> list[MessageEvent]:
        if isinstance(piece, CallBegin):
            name = new_call_id("toolu_", self._meta.call_id_length)
            block = ContentBlock(type="tool_use", id=name, name=piece.name, input={})
        elif isinstance(piece, Reasoning):
            block = ContentBlock(type="thinking", thinking="", signature="")
        else:
            block = ContentBlock(type="text", text="")
        self._blocks.append(block)
        return [self._block_event("start", content_block=block.model_copy())]

    def _grow(self, text: str) -> MessageEvent:
        kind, name = _DELTAS[self._blocks[-1].type]
        return self._block_event("delta", delta={"type": kind, name: text})

    def _close(self, text: str) -> list[MessageEvent]:
        block = self._blocks[-1]
        if block.type == "tool_use":
            block.input = _arguments(text)
        else:
            setattr(block, block.type, text)
        events = [self._block_event("stop")]
        if block.type == "thinking":
            block.signature = _SIGNATURE
            events.insert(0, self._block_event("delta", delta={"type": "signature_delta", "signature": _SIGNATURE}))
        return events

    def _block_event(self, kind: str, **fields: Any) -> MessageEvent:
        return MessageEvent(type=f"content_block_{kind}", index=len(self._blocks) - 1, **fields)


def _frames(events: Sequence[MessageEvent]) -> bytes:
    return b"".join([frame(event.json_bytes(), event.type) for event in events])


def _arguments(text: str) -> dict[str, Any]:
    """Return a call's input as far as it came, or as "invalid_json"."""
    try:
        arguments = from_json(text or "{}", allow_partial=True)
    except ValueError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"invalid_json": text}
