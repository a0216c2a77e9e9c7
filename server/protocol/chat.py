"""POST /v1/chat/completions: its request, its answer and its stream's chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from engine.core.errors import InvalidRequestError
from engine.core.types import SamplingParams
from server.choice import Delta
from server.errors import shorten, unsupported
from server.protocol.base import Integer, RequestBody, ResponseBody
from server.protocol.form import ChunkMould, Envelope
from server.protocol.limits import Limits
from server.protocol.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs, prompt_logprobs
from server.protocol.sampling import NO_OPS, UNSUPPORTED, SamplingBody
from server.protocol.usage import Usage


def _as_text(content: Any) -> Any:
    """Content may come in parts; those of text are joined, others cannot be read."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
        if isinstance(kind, str) and kind != "text":
            raise unsupported("messages", f"content of type {shorten(kind)!r} cannot be read; send text only.")
        if kind is None or not isinstance(text, str):
            raise ValueError('parts must look like {"type": "text", "text": "..."}')
        texts.append(text)
    return "\n".join(texts)


class Message(RequestBody):
    """One turn of a conversation. What else it holds (name, tool_calls, ...) is for the chat template to read."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str, BeforeValidator(_as_text)] = ""

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        return {**(self.model_extra or {}), "role": self.role, "content": self.content}


class Conversation(RequestBody):
    """Messages and how to make a prompt of them; /tokenize takes the same."""

    messages: list[Message] = Field(min_length=1)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_ending(self) -> Conversation:
        if not self.continue_final_message:
            return self
        if self.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt contradict each other; set only one.",
                param="continue_final_message",
            )
        if self.messages[-1].role != "assistant":
            raise InvalidRequestError(
                f"continue_final_message needs a last message of role assistant, not {self.messages[-1].role}.",
                param="continue_final_message",
            )
        return self

    def render(self, limits: Limits) -> str:
        """The prompt's text. Raises InvalidRequestError where the template refuses."""
        wants_prompt = self.add_generation_prompt
        return limits.tokenizer.apply_chat_template(
            [message.for_template() for message in self.messages],
            add_generation_prompt=not self.continue_final_message if wants_prompt is None else wants_prompt,
            continue_final_message=self.continue_final_message,
            template_kwargs=self.chat_template_kwargs,
        )


class ChatBody(SamplingBody, Conversation):
    """The request. `logprobs` switches them on, `top_logprobs` counts alternatives."""

    NO_OPS: ClassVar[frozenset[str]] = NO_OPS | {"parallel_tool_calls", "prediction"}
    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **UNSUPPORTED,
        **dict.fromkeys(("audio", "functions", "moderation", "tools", "verbosity", "web_search_options"), ()),
        "echo": (False,),
        "function_call": ("none",),
        "include_reasoning": (True,),
        "modalities": (["text"],),
        "reasoning_effort": (),
        "tool_choice": ("none",),
    }

    max_completion_tokens: Integer | None = Field(None, ge=1)
    max_tokens: Integer | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: Integer | None = Field(None, ge=0)
    add_special_tokens: bool = False

    @model_validator(mode="after")
    def _check_chat(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise InvalidRequestError(
                f"max_tokens is {both[0]} and max_completion_tokens {both[1]}; they mean the same, send one.",
                param="max_tokens",
            )
        return self

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def params(self, limits: Limits, num_prompt: int) -> SamplingParams:
        """The engine's parameters. Raises InvalidRequestError, or ContextLengthError for a prompt that fills all."""
        limits.check_logprobs(self.top_logprobs, "top_logprobs")
        asked = self.asked_max_tokens
        return self.sampling_params(
            limits,
            max_tokens=limits.rest_of_context(num_prompt, "messages") if asked is None else asked,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )


class ChatMessage(ResponseBody):
    role: str
    content: str
    refusal: None = None


class ChatDelta(ResponseBody):
    role: str | None = None
    content: str | None = None


class ChatChoice(ResponseBody):
    """A choice of an answer (with `message`) or of a chunk (with `delta`)."""

    index: int
    message: ChatMessage | None = None
    delta: ChatDelta | None = None
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


class ChatForm:
    """Implements Form for the chat API."""

    def __init__(self, body: ChatBody, envelope: Envelope) -> None:
        self._body = body
        self._envelope = envelope
        self._chunk_fields = envelope.fields("chat.completion.chunk")
        self._mould = ChunkMould(ChatCompletion(**self._chunk_fields, choices=[]))

    def answer(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        choices = [
            self._choice(index, delta, {"message": ChatMessage(role="assistant", content=delta.text, refusal=None)})
            for index, delta in enumerate(deltas)
        ]
        answer = ChatCompletion(**self._envelope.fields("chat.completion"), choices=choices, usage=usage)
        self._add_prompt(answer, deltas[0])
        return answer.json_bytes()

    def chunks(self, index: int, delta: Delta, **usage: Usage | None) -> list[bytes]:
        choice = self._choice(index, delta, {"delta": ChatDelta(content=delta.text)})
        if delta.prompt is None:
            return [self._mould.cast(choice, **usage)]
        chunk = ChatCompletion(**self._chunk_fields, choices=[choice], **usage)
        self._add_prompt(chunk, delta)
        role = ChatChoice(index=index, delta=ChatDelta(role="assistant", content=""), logprobs=None, finish_reason=None)
        return [self._mould.cast(role, **usage), chunk.json_bytes()]

    def closing(self, usage: Usage) -> bytes:
        return ChatCompletion(**self._chunk_fields, choices=[], usage=usage).json_bytes()

    def _choice(self, index: int, delta: Delta, content: dict[str, Any]) -> ChatChoice:
        finish = delta.finish_reason
        choice = ChatChoice(
            index=index,
            **content,
            logprobs=self._logprobs(delta),
            finish_reason=finish.value if finish else None,
        )
        if finish is not None:
            choice.stop_reason = delta.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = delta.token_ids
        return choice

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(self._envelope.tokenizer, delta, as_ids=self._body.return_tokens_as_token_ids)

    def _add_prompt(self, answer: ChatCompletion, delta: Delta) -> None:
        """What was asked to be told about the prompt, once it is known."""
        if delta.prompt is None:
            return
        if self._body.return_token_ids:
            answer.prompt_token_ids = list(self._envelope.prompts[0])
        if self._body.prompt_logprobs is not None and delta.prompt.logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(
                self._envelope.tokenizer, delta.prompt.logprobs, self._body.prompt_logprobs
            )
