"""The answers of /v1/responses: a document with its items, or numbered events. Pure data."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import Field

from engine.core.types import FinishReason, SamplingParams
from engine.text.chat.choice import Delta
from engine.text.tools.formats import new_call_id
from engine.text.types import CallBegin, Content, Piece, Reasoning
from server.answers.formatter import ChunkMeta, frame
from server.openai.logprobs import ChatLogprob, chat_logprobs
from server.openai.responses.body import ResponsesBody
from server.openai.translated import PieceWriter
from server.protocol.documents import CompletionTokensDetails, ResponseBody, Usage
from server.protocol.errors import ApiError
from server.telemetry.answer_metrics import AnswerMetrics


class OutputPart(ResponseBody):
    """Text with annotations and logprobs, or reasoning, without."""

    type: str = Field(description="Which kind of object this is.")
    text: str = Field(description="The text.")
    annotations: list[Any] | None = Field(None, description="Empty.")
    logprobs: list[ChatLogprob] | None = Field(None, description="Log probabilities of the tokens.")


class OutputItem(ResponseBody):
    """A message, a call or reasoning; its fields depend on its type."""

    id: str = Field(description="The object's name; stored objects are found by it.")
    type: str = Field(description="Which kind of object this is.")
    status: str = Field(description="How far it is.")
    role: str | None = Field(None, description="Who speaks.")
    content: list[OutputPart] | None = Field(None, description="The text, or the parts.")
    summary: list[Any] | None = Field(None, description="Empty: reasoning is not summarised.")
    call_id: str | None = Field(None, description="The call's name, for its result.")
    name: str | None = Field(None, description="Its name.")
    namespace: str | None = Field(None, description="The namespace of the function.")
    arguments: str | None = Field(None, description="The arguments as JSON.")


class InputTokensDetails(ResponseBody):
    cached_tokens: int = Field(description="Tokens of the prompt whose K/V was found.")
    cache_write_tokens: int = Field(description="Always 0.")


class ResponseUsage(ResponseBody):
    """The token counts under this API's names."""

    input_tokens: int = Field(description="Tokens of the prompt.")
    input_tokens_details: InputTokensDetails = Field(description="What was cached.")
    output_tokens: int = Field(description="Tokens generated, reasoning included.")
    output_tokens_details: CompletionTokensDetails = Field(description="What was reasoning.")
    total_tokens: int = Field(description="Both together.")

    @classmethod
    def of(cls, usage: Usage) -> ResponseUsage:
        details = usage.completion_tokens_details
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(
                cached_tokens=usage.prompt_tokens_details.cached_tokens, cache_write_tokens=0
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=CompletionTokensDetails(reasoning_tokens=details.reasoning_tokens if details else 0),
            total_tokens=usage.total_tokens,
        )


class IncompleteDetails(ResponseBody):
    reason: str = Field(description="max_output_tokens, or what else ended it.")


class ResponseError(ResponseBody):
    code: str = Field(description="For programs; see the page of errors.")
    message: str = Field(description="A sentence for people.")


class ResponseDocument(ResponseBody):
    """The answer, complete or in progress. It repeats the request."""

    id: str = Field(description="The object's name; stored objects are found by it.")
    object: str = Field(description="Which kind of object this is.")
    created_at: int = Field(description="When it was made, in seconds since 1970.")
    completed_at: int | None = Field(None, description="When it was complete.")
    status: str = Field(description="How far it is.")
    background: bool = Field(description="Always false.")
    error: ResponseError | None = Field(None, description="Why it failed, or null.")
    incomplete_details: IncompleteDetails | None = Field(None, description="Why it ended early, or null.")
    instructions: str | None = Field(description="As in the request.")
    max_output_tokens: int | None = Field(description="As in the request.")
    max_tool_calls: None = Field(None, description="Always null.")
    metadata: dict[str, str] = Field(description="As in the request.")
    model: str = Field(description="The model or adapter that answered.")
    output: list[OutputItem] = Field(description="The items of the answer: messages, reasoning, calls.")
    parallel_tool_calls: bool = Field(description="As in the request.")
    previous_response_id: str | None = Field(description="As in the request.")
    reasoning: dict[str, Any] = Field(description="As in the request.")
    service_tier: str = Field(description="Always default.")
    store: bool = Field(description="Whether it can be read and continued later.")
    temperature: float = Field(description="The value that was used.")
    text: dict[str, Any] = Field(description="As in the request.")
    tool_choice: str | dict[str, Any] = Field(description="As in the request.")
    tools: list[dict[str, Any]] = Field(description="As in the request.")
    top_logprobs: int = Field(description="As in the request.")
    top_p: float = Field(description="The value that was used.")
    truncation: str = Field(description="Always disabled.")
    usage: ResponseUsage | None = Field(None, description="How many tokens were read and generated.")


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


_CUT = {FinishReason.LENGTH: "max_output_tokens", FinishReason.CONTENT_FILTER: "content_filter"}


class ResponsesFormatter(PieceWriter[ResponseEvent]):
    """Formats /v1/responses; `keep` is called with the document of a success and the ids of its items."""

    def __init__(
        self,
        body: ResponsesBody,
        meta: ChunkMeta,
        params: SamplingParams,
        *,
        keep: Callable[[bytes, list[str]], None] | None = None,
    ) -> None:
        super().__init__()
        self._meta = meta
        self._tells_logprobs = body.tells_logprobs
        self._keep = keep
        self._functions = {full: (function.name, space) for full, space, function in body.functions}
        self._num_events = 0
        self._items: list[OutputItem] = []
        self._logprobs: list[ChatLogprob] = []  # of the open item
        self._waiting: list[list[ChatLogprob]] = []  # of the texts that are written next
        self._finish_reason: FinishReason | None = None  # once all pieces are written
        self._begun = ResponseDocument(
            id=f"{meta.id_prefix}_{meta.answer_id}",
            object="response",
            created_at=meta.created,
            completed_at=None,
            status="in_progress",
            background=False,
            error=None,
            incomplete_details=None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=None,
            metadata=body.metadata,
            model=meta.model,
            output=[],
            parallel_tool_calls=body.parallel_tool_calls,
            previous_response_id=body.previous_response_id,
            reasoning={"effort": body.reasoning.effort, "summary": None},
            service_tier="default",
            store=keep is not None,
            temperature=params.temperature,
            text={"format": body.text.format.model_dump(by_alias=True, exclude_none=True)},
            tool_choice=body.tool_choice.document(),
            tools=[tool.model_dump(exclude_unset=True) for tool in body.tools],
            top_logprobs=body.top_logprobs or 0,
            top_p=params.top_p,
            truncation="disabled",
            usage=None,
        )

    def answer(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        self._add(deltas[0])
        self._finish()
        return self._conclude(usage).json_bytes()

    def opening(self) -> bytes:
        names = ("created", "in_progress")
        return self._frames([ResponseEvent(type=f"response.{name}", response=self._begun) for name in names])

    def news(self, news: Sequence[tuple[int, Delta]], usage: Callable[[], Usage]) -> bytes:  # noqa: ARG002 - at the end
        return self._frames([event for _, delta in news for event in self._add(delta)])

    def closing(self, usage: Usage, metrics: AnswerMetrics | None) -> bytes:  # noqa: ARG002 - of chat
        events, document = self._finish(), self._conclude(usage)
        return self._frames([*events, ResponseEvent(type=f"response.{document.status}", response=document)])

    def failure(self, error: ApiError) -> bytes:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        failed = ResponseError(code=code, message=error.message)
        document = self._begun.model_copy(update={"status": "failed", "output": self._items, "error": failed})
        return self._frames([ResponseEvent(type="response.failed", response=document)])

    def _frames(self, events: Sequence[ResponseEvent]) -> bytes:
        for number, event in enumerate(events, self._num_events):
            event.sequence_number = number
        self._num_events += len(events)
        return b"".join([frame(event.json_bytes(), event.type) for event in events])

    def _conclude(self, usage: Usage) -> ResponseDocument:
        """Return the whole answer, after keeping it."""
        fields: dict[str, Any] = {"output": self._items, "usage": ResponseUsage.of(usage)}
        if self._finish_reason in _CUT:
            fields |= {
                "status": "incomplete",
                "incomplete_details": IncompleteDetails(reason=_CUT[self._finish_reason]),
            }
        else:
            fields |= {"status": "completed", "completed_at": int(time.time())}
        document = self._begun.model_copy(update=fields)
        if self._keep is not None:
            self._keep(document.json_bytes(), [item.id for item in self._items])
        return document

    def _add(self, delta: Delta) -> list[ResponseEvent]:
        if self._tells_logprobs:
            of_text = {} if delta.scored is None else delta.scored.of_text
            of_texts = [of_text.get(i, []) for i, piece in enumerate(delta.pieces) if type(piece) is Content]
            self._waiting = [chat_logprobs(self._meta.tokenizer, logprobs).content for logprobs in of_texts]
        events = self._write(delta)
        self._finish_reason = delta.finish_reason
        return events

    def _finish(self) -> list[ResponseEvent]:
        """End the open item; an empty answer becomes a message without text."""
        events = [] if self._items else self._begin_block(Content(""))
        return events + self._end_block()

    def _begin(self, piece: Piece) -> list[ResponseEvent]:
        unique = uuid.uuid4().hex
        if isinstance(piece, CallBegin):
            name, namespace = self._functions.get(piece.name, (piece.name, None))
            item = OutputItem(
                id=f"fc_{unique}",
                type="function_call",
                status="in_progress",
                call_id=piece.id or new_call_id("call_", self._meta.call_id_length),
                name=name,
                arguments="",
            )
            if namespace is not None:
                item.namespace = namespace
        elif isinstance(piece, Reasoning):
            item = OutputItem(id=f"rs_{unique}", type="reasoning", status="in_progress", summary=[], content=[])
        else:
            item = OutputItem(id=f"msg_{unique}", type="message", status="in_progress", role="assistant", content=[])
        self._items.append(item)
        events = [self._output_event("added", item.model_copy())]
        if item.content is not None:
            events.append(self._text_event("content_part.added", part=self._part("")))
        return events

    def _grow(self, text: str) -> ResponseEvent:
        kind = self._items[-1].type
        if kind == "function_call":
            return self._item_event("function_call_arguments.delta", delta=text)
        if kind == "reasoning":
            return self._text_event("reasoning_text.delta", delta=text)
        news = self._waiting.pop(0) if self._waiting else []
        self._logprobs += news
        return self._text_event("output_text.delta", delta=text, logprobs=news)

    def _close(self, text: str) -> list[ResponseEvent]:
        item = self._items[-1]
        item.status = "incomplete" if self._finish_reason in _CUT else "completed"
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
        if self._items[-1].type == "reasoning":
            return OutputPart(type="reasoning_text", text=text)
        return OutputPart(type="output_text", text=text, annotations=[], logprobs=list(self._logprobs))

    def _output_event(self, kind: str, item: OutputItem) -> ResponseEvent:
        return ResponseEvent(type=f"response.output_item.{kind}", output_index=len(self._items) - 1, item=item)

    def _item_event(self, kind: str, **fields: Any) -> ResponseEvent:
        index = len(self._items) - 1
        return ResponseEvent(type=f"response.{kind}", item_id=self._items[-1].id, output_index=index, **fields)

    def _text_event(self, kind: str, **fields: Any) -> ResponseEvent:
        return self._item_event(kind, content_index=0, **fields)
