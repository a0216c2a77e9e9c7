"""The output of /v1/responses: items, and the events by which they grow. Pure data."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from engine.core.types import FinishReason
from engine.text.choice import Delta
from engine.text.types import CallBegin, Content, Piece, Reasoning, Tokenizer
from server.http.bodies import ResponseBody
from server.openai.logprobs import ChatLogprob, chat_logprobs
from server.openai.translated import PieceWriter
from server.openai.usage import Usage


class OutputPart(ResponseBody):
    """Text with annotations and logprobs, or reasoning, without."""

    type: str
    text: str
    annotations: list[Any] | None = None
    logprobs: list[ChatLogprob] | None = None


class OutputItem(ResponseBody):
    """A message, a call or reasoning; its fields depend on its type."""

    id: str
    type: str
    status: str
    role: str | None = None
    content: list[OutputPart] | None = None
    summary: list[Any] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class InputTokensDetails(ResponseBody):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(ResponseBody):
    reasoning_tokens: int


class ResponseUsage(ResponseBody):
    """The token counts under this API's names."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> ResponseUsage:
        details = usage.completion_tokens_details
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(
                cached_tokens=usage.prompt_tokens_details.cached_tokens, cache_write_tokens=0
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=details.reasoning_tokens if details else 0),
            total_tokens=usage.total_tokens,
        )


class IncompleteDetails(ResponseBody):
    reason: str


class ResponseError(ResponseBody):
    code: str
    message: str


class ResponseDocument(ResponseBody):
    """The answer, complete or in progress. It repeats the request."""

    id: str
    object: str
    created_at: int
    completed_at: int | None = None
    status: str
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None


class ResponseEvent(ResponseBody):
    """One event of a stream; its fields depend on its type."""

    type: str
    sequence_number: int = 0
    response: ResponseDocument | None = None
    output_index: int | None = None
    item: OutputItem | None = None
    item_id: str | None = None
    content_index: int | None = None
    part: OutputPart | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[ChatLogprob] | None = None
    arguments: str | None = None


class OutputWriter(PieceWriter[ResponseEvent]):
    """Call `add` with deltas, then `finish`; both return the new events."""

    def __init__(self, tokenizer: Tokenizer, new_call_id: Callable[[], str], *, tells_logprobs: bool) -> None:
        super().__init__()
        self.items: list[OutputItem] = []
        self._tokenizer = tokenizer
        self._new_call_id = new_call_id
        self._tells_logprobs = tells_logprobs
        self._status = "completed"  # of a block that ends
        self._logprobs: list[ChatLogprob] = []  # of the open item
        self._waiting: list[ChatLogprob] = []  # of tokens whose text has not come yet

    def add(self, delta: Delta) -> list[ResponseEvent]:
        """Add a delta."""
        if not self._tells_logprobs or delta.reasoning or delta.calls:
            self._waiting.clear()  # of tokens outside the text
        else:
            ends = self._tokenizer.eos_token_ids
            shown = zip(chat_logprobs(self._tokenizer, delta).content, delta.logprob_ids, strict=True)
            self._waiting += [logprob for logprob, token_id in shown if token_id not in ends]
        return self._write(delta)

    def finish(self, reason: FinishReason | None) -> list[ResponseEvent]:
        """End the answer; an empty one becomes a message without text."""
        events = [] if self.items else self._begin_block(Content(""))
        self._status = "incomplete" if reason is FinishReason.LENGTH else "completed"
        return events + self._end_block()

    def _begin(self, piece: Piece) -> list[ResponseEvent]:
        unique = uuid.uuid4().hex
        if isinstance(piece, CallBegin):
            call = {"call_id": self._new_call_id(), "name": piece.name, "arguments": ""}
            item = OutputItem(id=f"fc_{unique}", type="function_call", status="in_progress", **call)
        elif isinstance(piece, Reasoning):
            item = OutputItem(id=f"rs_{unique}", type="reasoning", status="in_progress", summary=[], content=[])
        else:
            item = OutputItem(id=f"msg_{unique}", type="message", status="in_progress", role="assistant", content=[])
        self.items.append(item)
        events = [self._output_event("added", item.model_copy())]
        if item.content is not None:
            events.append(self._text_event("content_part.added", part=self._part("")))
        return events

    def _grow(self, text: str) -> ResponseEvent:
        kind = self.items[-1].type
        if kind == "function_call":
            return self._item_event("function_call_arguments.delta", delta=text)
        if kind == "reasoning":
            return self._text_event("reasoning_text.delta", delta=text)
        news, self._waiting = self._waiting, []
        self._logprobs += news
        return self._text_event("output_text.delta", delta=text, logprobs=news)

    def _close(self, text: str) -> list[ResponseEvent]:
        item = self.items[-1]
        item.status = self._status
        if item.type == "function_call":
            item.arguments = text
            events = [self._item_event("function_call_arguments.done", arguments=text)]
        else:
            part = self._part(text)
            item.content = [part]
            if item.type == "reasoning":
                done = self._text_event("reasoning_text.done", text=text)
            else:
                done = self._text_event("output_text.done", text=text, logprobs=part.logprobs)
            events = [done, self._text_event("content_part.done", part=part)]
        self._logprobs = []
        return [*events, self._output_event("done", item)]

    def _part(self, text: str) -> OutputPart:
        if self.items[-1].type == "reasoning":
            return OutputPart(type="reasoning_text", text=text)
        return OutputPart(type="output_text", text=text, annotations=[], logprobs=list(self._logprobs))

    def _output_event(self, kind: str, item: OutputItem) -> ResponseEvent:
        return ResponseEvent(type=f"response.output_item.{kind}", output_index=len(self.items) - 1, item=item)

    def _item_event(self, kind: str, **fields: Any) -> ResponseEvent:
        index = len(self.items) - 1
        return ResponseEvent(type=f"response.{kind}", item_id=self.items[-1].id, output_index=index, **fields)

    def _text_event(self, kind: str, **fields: Any) -> ResponseEvent:
        return self._item_event(kind, content_index=0, **fields)
