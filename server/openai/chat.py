"""POST /v1/chat/completions: the route, its answer and its chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from engine.core.types import FinishReason
from engine.text.choice import CallDelta, Delta
from engine.text.logprobs import PromptLogprobs
from engine.text.tools.formats import new_call_id
from server.context import InContext, json_body
from server.http.bodies import ResponseBody
from server.http.openapi import answers
from server.openai.chat_request import ChatBody, prepare
from server.openai.formatter import ChunkFormatter, ChunkMeta
from server.openai.logprobs import ChatLogprobs, chat_logprobs
from server.openai.usage import Usage
from server.respond import chunk_meta, respond


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


class ChatFormatter(ChunkFormatter):
    """Formats answers of the chat API."""

    _body: ChatBody

    def __init__(self, body: ChatBody, meta: ChunkMeta, *, call_id_length: int = 0) -> None:
        self._chunk_fields = meta.fields("chat.completion.chunk")
        super().__init__(body, meta, ChatCompletion(**self._chunk_fields, choices=[]))
        self._call_id_length = call_id_length

    def answer(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        choices = [
            self._choice(index, delta, {"message": self._message(delta, is_whole=True)})
            for index, delta in enumerate(deltas)
        ]
        answer = ChatCompletion(**self._meta.fields("chat.completion"), choices=choices, usage=usage)
        self._add_prompt(answer, deltas[0])
        return answer.json_bytes()

    def chunks(self, index: int, delta: Delta, **usage: Usage | None) -> list[bytes]:
        choice = self._choice(index, delta, {"delta": self._message(delta)})
        if delta.prompt is None:
            return [self._render(choice, **usage)]
        chunk = ChatCompletion(**self._chunk_fields, choices=[choice], **usage)
        self._add_prompt(chunk, delta)
        message = ChatMessage(role="assistant", content="")
        role = ChatChoice(index=index, delta=message, logprobs=None, finish_reason=None)
        return [self._render(role, **usage), chunk.json_bytes()]

    def _message(self, delta: Delta, *, is_whole: bool = False) -> ChatMessage:
        """Return a whole answer or a chunk's part of it; there is no content beside other parts only."""
        message = ChatMessage(role="assistant", content=None, refusal=None) if is_whole else ChatMessage()
        if delta.text or not (delta.reasoning or delta.calls):
            message.content = delta.text
        if delta.reasoning and self._body.include_reasoning:
            message.reasoning_content = message.reasoning = delta.reasoning
        if delta.calls:
            message.tool_calls = [
                self._call(call) if is_whole else self._call(call, index=call.index) for call in delta.calls
            ]
        return message

    def _call(self, call: CallDelta, **index: int) -> ChatToolCall:
        function = ChatFunction(arguments=call.arguments)
        if call.name is None:
            return ChatToolCall(**index, function=function)
        function.name = call.name
        name = call.id or new_call_id("call_", self._call_id_length)
        return ChatToolCall(**index, id=name, type="function", function=function)

    def _choice(self, index: int, delta: Delta, content: dict[str, Any]) -> ChatChoice:
        finish = delta.finish_reason
        choice = ChatChoice(index=index, **content, logprobs=None, finish_reason=finish.value if finish else None)
        if self._body.logprobs:
            as_ids = self._body.return_tokens_as_token_ids
            choice.logprobs = chat_logprobs(self._meta.tokenizer, delta, as_ids=as_ids)
        if finish is not None:
            choice.stop_reason = delta.stop_reason
            if finish is FinishReason.STOP and delta.has_called:
                choice.finish_reason = "tool_calls"
        if self._body.return_token_ids:
            choice.token_ids = delta.token_ids
        return choice

    def _add_prompt(self, answer: ChatCompletion, delta: Delta) -> None:
        """Add the prompt's tokens and log probabilities, if asked for and computed."""
        if delta.prompt is not None and self._body.return_token_ids:
            answer.prompt_token_ids = list(self._meta.prompts[0])
        if (logprobs := self._prompt_logprobs(delta)) is not None:
            answer.prompt_logprobs = logprobs


router = APIRouter()


@router.post("/v1/chat/completions", responses=answers(ChatCompletion, streams=True))
async def create_chat_completion(
    http: Request, context: InContext, body: Annotated[ChatBody, Depends(json_body(ChatBody))]
) -> Response:
    """Answer a conversation."""
    model = context.check_model(body.model)
    chat, requests = await prepare(context, body)
    meta = chunk_meta(context, requests, id_prefix="chatcmpl", model=model)
    formatter = ChatFormatter(body, meta, call_id_length=context.limits.call_id_length)
    return await respond(http, context, body, requests, chat.rules, formatter)
