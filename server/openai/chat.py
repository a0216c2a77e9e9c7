"""POST /v1/chat/completions: the answer and its chunks.

Event loop; long texts are rendered and encoded on other threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from engine.core.types import FinishReason
from engine.text.chat.choice import CallDelta, Delta
from engine.text.tokenizer import PromptLogprobs
from engine.text.tools.formats import new_call_id
from server.answers.body import ChatBody
from server.answers.formatter import ChunkFormatter
from server.answers.parts import InModel, InResponder
from server.http.bodies import json_body
from server.http.openapi import answers
from server.openai.logprobs import ChatLogprobs, chat_logprobs
from server.protocol.documents import Filtered, Headed, ResponseBody, Usage


class ChatFunction(ResponseBody):
    name: str | None = Field(None, description="Its name.")
    arguments: str = Field(description="The arguments as JSON.")


class ChatToolCall(ResponseBody):
    """A tool call, or its part in a chunk: the first has id, type and name."""

    index: int | None = Field(None, description="Its place in the list.")
    id: str | None = Field(None, description="The object's name; stored objects are found by it.")
    type: str | None = Field(None, description="Which kind of object this is.")
    function: ChatFunction = Field(description="The function's name and arguments.")


class ChatMessage(ResponseBody):
    """An answer, or its part in a chunk. Reasoning has both names in use."""

    role: str | None = Field(None, description="Who speaks.")
    reasoning_content: str | None = Field(None, description="The reasoning, apart from the answer.")
    reasoning: str | None = Field(None, description="The same under the name of newer clients.")
    content: str | None = Field(None, description="The text, or the parts.")
    refusal: None = Field(None, description="Always null.")
    tool_calls: list[ChatToolCall] | None = Field(None, description="The calls that the model makes.")


class ChatChoice(ResponseBody):
    """A choice of an answer (with `message`) or of a chunk (with `delta`)."""

    index: int = Field(description="Its place in the list.")
    message: ChatMessage | None = Field(None, description="The answer, where it is not streamed.")
    delta: ChatMessage | None = Field(None, description="What a chunk of a stream adds to the message.")
    logprobs: ChatLogprobs | None = Field(None, description="Log probabilities of the tokens.")
    finish_reason: str | None = Field(None, description="stop, length, tool_calls, content_filter, or error.")
    stop_reason: int | str | None = Field(None, description="The stop string or token id that ended the answer.")
    token_ids: list[int] | None = Field(None, description="The answer's token ids, if return_token_ids asks for them.")
    content_filter_results: dict[str, Filtered] | None = Field(
        None, description="The guard's categories, if it ended the answer."
    )


class ChatCompletion(Headed):
    """The answer, and a chunk of it."""

    system_fingerprint: str = Field(description="The daemon's version.")
    choices: list[ChatChoice] = Field(description="The answers, n of them.")
    usage: Usage | None = Field(None, description="How many tokens were read and generated.")
    prompt_token_ids: list[int] | None = Field(
        None, description="The prompt's token ids, if return_token_ids asks for them."
    )
    prompt_logprobs: PromptLogprobs | None = Field(None, description="Log probabilities of the prompt's tokens.")


class ChatFormatter(ChunkFormatter):
    """Formats answers of the chat API."""

    chunk, object_name = ChatCompletion, "chat.completion.chunk"
    _body: ChatBody

    def answer(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        choices = [
            self._choice(index, delta, {"message": self._message(delta, is_whole=True)})
            for index, delta in enumerate(deltas)
        ]
        answer = ChatCompletion(**self._meta.fields("chat.completion"), choices=choices, usage=usage)
        self._add_prompt(answer, deltas[0])
        return answer.json_bytes()

    def chunks(self, index: int, delta: Delta, **usage: Usage | None) -> list[bytes]:
        *before, last = self._parts(delta)
        if delta.prompt is not None:
            before.insert(0, ChatMessage(role="assistant", content=""))
        begun = [ChatChoice(index=index, delta=part, logprobs=None, finish_reason=None) for part in before]
        chunks = [self._render(choice.json_bytes(), **usage) for choice in begun]
        choice = self._choice(index, delta, {"delta": last})
        if delta.prompt is None:
            return [*chunks, self._render(choice.json_bytes(), **usage)]
        chunk = ChatCompletion(**self._chunk_fields, choices=[choice], **usage)
        self._add_prompt(chunk, delta)
        return [*chunks, chunk.json_bytes()]

    def _parts(self, delta: Delta) -> list[ChatMessage]:
        """Return the messages of a delta's chunks: clients such as Haystack take text, thoughts or calls of one."""
        whole = self._message(delta)
        if len(delta.pieces) < 2:
            return [whole]
        thoughts, calls = whole.reasoning_content, whole.tool_calls
        parts = [] if thoughts is None else [ChatMessage(reasoning_content=thoughts, reasoning=thoughts)]
        parts += [] if whole.content is None else [ChatMessage(content=whole.content)]
        parts += [] if calls is None else [ChatMessage(tool_calls=calls)]
        return parts or [whole]

    def _message(self, delta: Delta, *, is_whole: bool = False) -> ChatMessage:
        """Return an answer, or a chunk's part of it."""
        message = ChatMessage(role="assistant", content=None, refusal=None) if is_whole else ChatMessage()
        text = delta.text
        if text and len(delta.pieces) == 1:  # as nearly always
            message.content = text
            return message
        reasoning, calls = delta.reasoning, delta.calls
        if text or not (reasoning or calls):
            message.content = text
        if reasoning and self._body.include_reasoning:
            message.reasoning_content = message.reasoning = reasoning
        if calls:
            message.tool_calls = [
                self._call(call) if is_whole else self._call(call, index=call.index) for call in calls
            ]
        return message

    def _call(self, call: CallDelta, **index: int) -> ChatToolCall:
        function = ChatFunction(arguments=call.arguments)
        if call.name is None:
            return ChatToolCall(**index, function=function)
        function.name = call.name
        name = call.id or new_call_id("call_", self._meta.call_id_length)
        return ChatToolCall(**index, id=name, type="function", function=function)

    def _choice(self, index: int, delta: Delta, content: dict[str, Any]) -> ChatChoice:
        finish = delta.finish_reason
        choice = ChatChoice(index=index, **content, logprobs=None, finish_reason=finish.value if finish else None)
        if self._body.logprobs:
            choice.logprobs = chat_logprobs(self._meta.tokenizer, delta.logprobs, as_ids=self._spells_ids)
        if finish is not None:
            choice.stop_reason = delta.stop_reason
            if finish is FinishReason.STOP and delta.has_called:
                choice.finish_reason = "tool_calls"
            if delta.filtered is not None:
                choice.content_filter_results = {name: Filtered(filtered=True) for name in delta.filtered}
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
    http: Request,
    body: Annotated[ChatBody, Depends(json_body(ChatBody, spends=True))],
    model: InModel,
    responder: InResponder,
) -> Response:
    """Answer a conversation."""
    named = model.find(body.model)
    chat = await model.prepare(http, body, named)
    requests = responder.chat_requests(body, named.adapter, chat)
    meta = responder.meta(requests, id_prefix="chatcmpl", model=named.name)
    return await responder.respond(http, body, requests, chat.rules, partial(ChatFormatter, body, meta))
