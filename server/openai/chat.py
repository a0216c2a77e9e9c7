"""POST /v1/chat/completions: the route, its answer and its chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from engine.core.types import FinishReason
from engine.text.choice import CallDelta, Delta
from engine.text.logprobs import PromptLogprobs, prompt_logprobs
from engine.text.tools.formats import new_call_id
from server.context import InContext, json_body
from server.http.bodies import ResponseBody
from server.http.openapi import answers
from server.openai.chat_request import ChatBody, chunk_meta, prepare
from server.openai.formatter import ChunkMeta, Chunks, ChunkTemplate
from server.openai.logprobs import ChatLogprobs, chat_logprobs
from server.openai.usage import Usage
from server.respond import respond


class ChatFunction(ResponseBody):
    name: str | None = None
    arguments: str


class ChatToolCall(ResponseBody):
    """A tool call, or its part in a chunk: the first has id, type and name."""

    index: int | None = None
    id: str | None = None
    type: str | None = None
    function: ChatFunction


class ChatMessage(ResponseBody):
    """An answer, or its part in a chunk. Reasoning has both names in use."""

    role: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    content: str | None = None
    refusal: None = None
    tool_calls: list[ChatToolCall] | None = None


class ChatChoice(ResponseBody):
    """A choice of an answer (with `message`) or of a chunk (with `delta`)."""

    index: int
    message: ChatMessage | None = None
    delta: ChatMessage | None = None
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(ResponseBody):
    """The answer, and a chunk of it."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatFormatter:
    """Implements ChunkFormatter for the chat API."""

    def __init__(self, body: ChatBody, meta: ChunkMeta, *, call_id_length: int = 0) -> None:
        self._body = body
        self._meta = meta
        self._call_id_length = call_id_length
        self._chunk_fields = meta.fields("chat.completion.chunk")
        self._template = ChunkTemplate(ChatCompletion(**self._chunk_fields, choices=[]))

    def answer(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        choices = [self._choice(index, delta, {"message": self._message(delta)}) for index, delta in enumerate(deltas)]
        answer = ChatCompletion(**self._meta.fields("chat.completion"), choices=choices, usage=usage)
        self._add_prompt(answer, deltas[0])
        return answer.json_bytes()

    def chunks(self, index: int, delta: Delta, **usage: Usage | None) -> list[bytes]:
        choice = self._choice(index, delta, {"delta": self._news(delta)})
        if delta.prompt is None:
            return [self._template.render(choice, **usage)]
        chunk = ChatCompletion(**self._chunk_fields, choices=[choice], **usage)
        self._add_prompt(chunk, delta)
        message = ChatMessage(role="assistant", content="")
        role = ChatChoice(index=index, delta=message, logprobs=None, finish_reason=None)
        return [self._template.render(role, **usage), chunk.json_bytes()]

    def closing(self, usage: Usage) -> bytes:
        return ChatCompletion(**self._chunk_fields, choices=[], usage=usage).json_bytes()

    def _message(self, delta: Delta) -> ChatMessage:
        """Return a whole answer; its content is null if it has only other parts."""
        message = ChatMessage(role="assistant", content=delta.text, refusal=None)
        if not delta.text and (delta.reasoning or delta.calls):
            message.content = None
        self._add_thoughts(message, delta)
        if delta.calls:
            message.tool_calls = [self._call(call) for call in delta.calls]
        return message

    def _news(self, delta: Delta) -> ChatMessage:
        message = ChatMessage()
        if delta.text or not (delta.reasoning or delta.calls):
            message.content = delta.text
        self._add_thoughts(message, delta)
        if delta.calls:
            message.tool_calls = [self._call(call, index=call.index) for call in delta.calls]
        return message

    def _add_thoughts(self, message: ChatMessage, delta: Delta) -> None:
        if delta.reasoning and self._body.include_reasoning:
            message.reasoning_content = message.reasoning = delta.reasoning

    def _call(self, call: CallDelta, **index: int) -> ChatToolCall:
        if call.name is None:
            return ChatToolCall(**index, function=ChatFunction(arguments=call.arguments))
        return ChatToolCall(
            **index,
            id=new_call_id("call_", self._call_id_length),
            type="function",
            function=ChatFunction(name=call.name, arguments=call.arguments),
        )

    def _choice(self, index: int, delta: Delta, content: dict[str, Any]) -> ChatChoice:
        finish = delta.finish_reason
        has_called = finish is FinishReason.STOP and delta.has_called
        choice = ChatChoice(
            index=index,
            **content,
            logprobs=self._logprobs(delta),
            finish_reason="tool_calls" if has_called else finish.value if finish else None,
        )
        if finish is not None:
            choice.stop_reason = delta.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = delta.token_ids
        return choice

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(self._meta.tokenizer, delta, as_ids=self._body.return_tokens_as_token_ids)

    def _add_prompt(self, answer: ChatCompletion, delta: Delta) -> None:
        """Add what the request wants to know of the prompt, once it is computed."""
        if delta.prompt is None:
            return
        if self._body.return_token_ids:
            answer.prompt_token_ids = list(self._meta.prompts[0])
        if self._body.prompt_logprobs is not None and delta.prompt.logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(
                self._meta.tokenizer, delta.prompt.logprobs, self._body.prompt_logprobs
            )


router = APIRouter()


@router.post("/v1/chat/completions", responses=answers(ChatCompletion, streams=True))
async def create_chat_completion(
    http: Request, context: InContext, body: Annotated[ChatBody, Depends(json_body(ChatBody))]
) -> Response:
    """Answer a conversation."""
    model = context.check_model(body.model)
    chat, requests = await prepare(context, body)
    meta = chunk_meta(context, chat, requests, id_prefix="chatcmpl", model=model)
    formatter = ChatFormatter(body, meta, call_id_length=context.limits.call_id_length)
    return await respond(http, context, body, requests, chat.rules, Chunks(formatter, body.stream_usage))
