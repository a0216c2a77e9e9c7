"""POST /v1/messages and /v1/messages/count_tokens: routes, requests, translation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from engine.core.errors import ClientError, ContextLengthError, InvalidRequestError
from engine.core.types import Pin
from engine.text.chat.history import Owner
from engine.text.chat.limits import num_common
from engine.text.fields.body import IdleFields, Integer, Refused, RequestBody
from engine.text.fields.chat import Message
from engine.text.fields.structured import Schema
from engine.text.fields.tools import ToolName
from engine.text.requests.chat_preprocessor import PreparedChat
from server.answers.body import ChatBody
from server.answers.model import ServedModel, aside
from server.answers.parts import InEngine, InModel, InResponder
from server.anthropic.blocks import (
    Block,
    Blocks,
    CacheControl,
    MarkPosition,
    Turn,
    chat_messages,
    end_of,
    joined_text,
    last_marks,
    marks_in,
    referred_tools,
    up_to,
)
from server.anthropic.formatter import AnthropicError, AnthropicMessage, MessageFormatter
from server.http.bodies import json_body
from server.http.openapi import answers
from server.openai.translated import TranslatedBody
from server.protocol.errors import ApiError

_BILLING = "x-anthropic-billing-header:"


def _chat_messages(
    system: Sequence[Block] | None, turns: Sequence[Turn], definitions: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the chat's messages, without Claude Code's billing block.

    That block is the first and differs between sessions: with it, no session would find the prefix of another cached.
    """
    messages = chat_messages(turns, definitions)
    if system is not None:
        blocks = [block for block in system if not (block.text or "").startswith(_BILLING)]
        messages.insert(0, {"role": "system", "content": joined_text(blocks, "system")})
    return messages


def _overflow(error: ContextLengthError) -> str:
    """Return the sentence by which Anthropic's clients know to compact the context."""
    if error.max_tokens and error.num_prompt < error.limit:
        return (
            f"input length and `max_tokens` exceed context limit: {error.num_prompt} + {error.max_tokens} > {error.limit}, "
            "decrease input length or `max_tokens` and try again"
        )
    return f"prompt is too long: {error.num_prompt} tokens > {error.limit} maximum"


class MessageTool(RequestBody):
    """One entry of `tools`."""

    NO_OPS: ClassVar[frozenset[str]] = frozenset({"eager_input_streaming"})  # arguments are sent as they are written

    type: Literal["custom"] = Field("custom", description="Which kind of object this is.")
    name: ToolName = Field(description="Its name.")
    description: str | None = Field(None, description="What it is for; the model reads it.")
    input_schema: dict[str, Any] = Field(description="A JSON schema of the arguments.")
    strict: bool = Field(False, description="Enforce the schema while the model generates.")
    defer_loading: bool = Field(False, description="Tell the model of it only in a tool_reference of a tool's result.")
    cache_control: CacheControl | None = Field(None, description="Pin the prompt's K/V up to this block.")

    @model_validator(mode="after")
    def _check_schema(self) -> MessageTool:
        if self.input_schema.get("type", "object") != "object":
            raise ValueError('input_schema must be a schema of type "object"')
        return self

    def definition(self) -> str:
        """Return the tool as Claude Code announces the result of its search for tools."""
        tool = {"description": self.description or "", "name": self.name, "parameters": self.input_schema}
        return f"<functions>\n<function>{json.dumps(tool, ensure_ascii=False)}</function>\n</functions>"

    def for_chat(self, *, is_shown: bool) -> dict[str, Any]:
        function = self.model_dump(include={"name", "description", "strict"}, exclude_defaults=True)
        shown = {} if is_shown else {"defer_loading": True}
        return {"type": "function", "function": {**function, "parameters": self.input_schema}, **shown}


class MessageToolChoice(RequestBody):
    """Whether a tool may or must be used, and whether several may."""

    type: Literal["auto", "any", "tool", "none"] = Field(description="Which kind of object this is.")
    name: str | None = Field(None, description="Its name.")
    disable_parallel_tool_use: bool = Field(False, description="At most one call in an answer.")

    @model_validator(mode="after")
    def _check_name(self) -> MessageToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("a name is for the type tool, which needs one")
        return self

    def for_chat(self) -> str | dict[str, Any]:
        if self.name is not None:
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class ThinkingConfig(RequestBody):
    """Whether to think, and for how many tokens; `adaptive` sets no limit."""

    HINTS: ClassVar[Mapping[str, tuple[Any, ...]]] = {"display": ("summarized",)}

    type: Literal["enabled", "disabled", "adaptive"] = Field(description="Which kind of object this is.")
    budget_tokens: Integer | None = Field(None, ge=1, description="Reasoning ends after this many tokens.")

    @model_validator(mode="after")
    def _check_budget(self) -> ThinkingConfig:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise ValueError("budget_tokens is for the type enabled, which needs it")
        return self


class OutputFormat(RequestBody):
    type: Literal["json_schema"] = Field(description="Which kind of object this is.")
    schema_: Schema = Field(alias="schema", description="A JSON schema.")

    def for_chat(self) -> dict[str, Any]:
        return {"type": self.type, "json_schema": {"name": "answer", "schema": self.schema_, "strict": True}}


class OutputConfig(RequestBody):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="How much the model reasons: low, medium, high, xhigh, max."
    )
    format: OutputFormat | None = Field(None, description="The form of the answer's text.")


class Metadata(RequestBody):
    user_id: str | None = Field(None, description="Names the tenant, as user does.")


class CountBody(TranslatedBody):
    """The fields of the prompt, which /v1/messages/count_tokens has too."""

    NO_OPS: ClassVar[frozenset[str]] = frozenset(
        {"diagnostics", "inference_geo", "service_tier", "user_profile_id", "workspace_id"}
    )
    # Edits would shorten the conversation: without them, one that is too long is a 400.
    HINTS: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **TranslatedBody.HINTS,
        "context_management": ({},),
        "speed": ("standard",),
    }
    UNSUPPORTED: ClassVar[Mapping[str, Refused]] = {
        **TranslatedBody.UNSUPPORTED,
        "compaction": Refused((), "ask for a summary in messages"),
        "container": Refused(),
        "instructions": Refused((), "send system"),
        **dict.fromkeys(("max_completion_tokens", "max_output_tokens"), Refused((), "send max_tokens")),
        "mcp_servers": Refused(([],)),
        "n": Refused((1,)),
        "parallel_tool_calls": Refused((True,), "send tool_choice: {disable_parallel_tool_use: ...}"),
        "reasoning_effort": Refused((), "send thinking, or output_config: {effort: ...}"),
        "response_format": Refused((), "send output_config: {format: ...}"),
        "stop": Refused(([],), "send stop_sequences"),
        "thread": Refused((), "nothing is kept between requests; send the whole conversation in messages"),
    }
    IDLE: ClassVar[IdleFields] = {
        **TranslatedBody.IDLE,
        "thinking": lambda body, limits: body.thinking.type == "enabled" and limits.chat_format.tag_ids is None,
        "output_config.effort": lambda body, limits: (
            body.output_config.effort is not None and not limits.chat_format.takes_effort
        ),
    }
    OWN_TOOLS = ("custom", None)
    OWN_NAMES: ClassVar[Mapping[str, str]] = {
        "user": "metadata.user_id",
        "stop": "stop_sequences",
        "thinking_token_budget": "thinking",
        "reasoning_effort": "output_config.effort",
        "response_format.json_schema": "output_config.format",
        "response_format": "output_config.format",
    }

    messages: list[Turn] = Field(min_length=1, description="The conversation, oldest turn first.")
    system: Blocks | None = Field(None, description="The system message.")
    tools: list[MessageTool] = Field(default_factory=list, description="The tools that the model may call.")
    tool_choice: MessageToolChoice | None = Field(
        None, description="Whether a tool may or must be used: auto if absent."
    )
    thinking: ThinkingConfig = Field(
        default_factory=lambda: ThinkingConfig(type="adaptive"),
        description="Whether the model reasons, and its budget of tokens.",
    )
    output_config: OutputConfig = Field(default_factory=OutputConfig, description="Effort and form of the answer.")
    output_format: OutputFormat | None = Field(None, description="JSON of a schema.")
    metadata: Metadata | None = Field(None, description="No effect.")
    cache_control: CacheControl | None = Field(None, description="Pin the prompt's K/V up to this block.")

    @classmethod
    @contextmanager
    def own_names(cls) -> Iterator[None]:
        """Name this API's fields in errors, and use its sentence for a long prompt."""
        try:
            with super().own_names():
                yield
        except ApiError as error:
            if isinstance(error.__cause__, ContextLengthError):
                error.message = _overflow(error.__cause__)
            raise

    @model_validator(mode="after")
    def _check(self) -> CountBody:
        choice = self.tool_choice
        if choice is not None and choice.type in ("any", "tool") and not self.tools:
            raise InvalidRequestError("tool_choice needs tools; send them, or leave it out.", param="tool_choice")
        if self.output_format is not None and self.output_config.format is not None:
            message = "output_format and output_config.format mean the same; send only one."
            raise InvalidRequestError(message, param="output_format")
        return self

    def to_chat(self) -> ChatBody:
        """Return the chat. A last message of the assistant is continued."""
        messages = _chat_messages(self.system, self.messages, self._definitions())
        is_prefilled = self.messages[-1].role == "assistant"
        if is_prefilled and "tool_calls" in messages[-1]:
            message = "The last message uses tools; send what they gave as tool_result blocks of a user's message."
            raise InvalidRequestError(message, param="messages")
        tools = self._chat_tools()
        choice = self.tool_choice if tools else None
        output_format = self.output_format or self.output_config.format
        return self.chat_body(
            {
                "messages": messages,
                "continue_final_message": is_prefilled,
                "tools": tools,
                "tool_choice": None if choice is None else choice.for_chat(),
                "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
                "user": None if self.metadata is None else self.metadata.user_id,
                "response_format": None if output_format is None else output_format.for_chat(),
                "thinking_token_budget": self.thinking.budget_tokens,
                "reasoning_effort": "none" if self.thinking.type == "disabled" else self.output_config.effort,
            }
        )

    def _definitions(self) -> dict[str, str]:
        """Return the definitions of the tools to which results refer, by name."""
        referred = referred_tools(self.messages)
        return {tool.name: tool.definition() for tool in self.tools if tool.name in referred}

    def _chat_tools(self) -> list[dict[str, Any]]:
        """Return the tools that the model knows: of the deferred ones those to which results refer.

        Anthropic's own search does not exist here: beside it the model knows all.
        """
        if any(name.startswith("tools.tool_search_tool") for name in self.model_extra or ()):
            return [tool.for_chat(is_shown=True) for tool in self.tools]
        referred = referred_tools(self.messages)
        known = [tool for tool in self.tools if not tool.defer_loading or tool.name in referred]
        return [tool.for_chat(is_shown=not tool.defer_loading) for tool in known]

    def retained(self, chat: ChatBody) -> list[tuple[float, ChatBody | None]]:
        """Return durations and the beginnings to retain; None is the whole of `chat`."""
        end = end_of(self.messages[-1].content, len(self.messages))
        return [
            (seconds, None if place == end else self._beginning(chat, place))
            for seconds, place in last_marks(self._marks()).items()
        ]

    def _marks(self) -> Iterator[tuple[MarkPosition, CacheControl]]:
        """Yield each mark and its place."""
        system = self.system or []
        for tool in self.tools:
            if tool.cache_control is not None:  # many templates show the system prompt before the tools
                yield end_of(system, 0), tool.cache_control
        yield from marks_in(system, 0)
        for number, turn in enumerate(self.messages, start=1):
            yield from marks_in(turn.content, number)
        if self.cache_control is not None:
            yield end_of(self.messages[-1].content, len(self.messages)), self.cache_control

    def _beginning(self, chat: ChatBody, place: MarkPosition) -> ChatBody:
        """Return the chat up to a place, with a placeholder if it has no message."""
        system, turns = self.system, [Turn.model_validate({"role": "user", "content": "-"})]
        if place.turn:
            *before, last = self.messages[: place.turn]
            turns = [*before, last.model_copy(update={"content": up_to(place, last.content)})]
        elif system is not None:
            system = up_to(place, system)
        messages = _chat_messages(system, turns, self._definitions())
        shown = [Message.model_validate(message) for message in messages]
        return chat.model_copy(update={"messages": shown, "continue_final_message": False})


class MessagesBody(CountBody):
    """The request."""

    ANSWERED: ClassVar[Mapping[str, str]] = {"max_tokens": "max_tokens", "stop": "stop_sequences"}

    metadata: Metadata | None = Field(None, description="user_id names the tenant, as user does.")
    max_tokens: Integer = Field(ge=1, description="The most tokens to generate, reasoning included.")
    stop_sequences: list[str] = Field(
        default_factory=list, description="Texts that end the answer; they are not part of it."
    )


router = APIRouter()

FAILURES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": AnthropicError, "description": "The request cannot be served"},
    "5XX": {"model": AnthropicError, "description": "The server failed, or is about to end"},
}


@router.post("/v1/messages", responses={**answers(AnthropicMessage, streams=True), **FAILURES})
async def create_message(
    http: Request,
    body: Annotated[MessagesBody, Depends(json_body(MessagesBody, spends=True))],
    model: InModel,
    responder: InResponder,
    engine: InEngine,
) -> Response:
    """Answer a conversation."""
    named = model.find(body.model)
    with body.own_names():
        chat = await aside(body.to_chat)
        prepared = await model.prepare(http, chat, named)
        requests = responder.chat_requests(chat, named.adapter, prepared)
        meta = responder.meta(requests, id_prefix="msg", model=named.name)
        if engine.config.pinned_share:
            pins = requests[0].pins + await _pins(model, body, chat, prepared, named.history_owner(http, chat))
            requests = [replace(request, pins=pins) for request in requests]
        return await responder.respond(http, chat, requests, prepared.rules, partial(MessageFormatter, meta))


async def _pins(
    model: ServedModel, body: MessagesBody, chat: ChatBody, prepared: PreparedChat, answers_of: Owner | None
) -> tuple[Pin, ...]:
    """Return the pins that cache_control asks for."""
    pins = []
    for seconds, beginning in await aside(lambda: body.retained(chat)):
        whole = len(prepared.prompt)
        num = whole if beginning is None else await _count_common(model, beginning, prepared, answers_of)
        pins.append(Pin(num, seconds))
    return tuple(pins)


async def _count_common(model: ServedModel, body: ChatBody, chat: PreparedChat, answers_of: Owner | None) -> int:
    """Return how many tokens a prompt shares with another conversation; 0 on errors."""
    try:
        rendered = await model.render(body)
        common = await aside(lambda: chat.text[: num_common(rendered, chat.text)])
        images = chat.images[: model.preprocessor.images.count(common)] if model.preprocessor.images else ()
        ids = await aside(lambda: model.preprocessor.encode(body, common, answers_of, images), len(common))
    except (ClientError, ApiError):
        return 0
    return num_common(ids, chat.prompt)


@router.post("/v1/messages/count_tokens", responses=FAILURES)
async def count_tokens(
    http: Request,
    body: Annotated[CountBody, Depends(json_body(CountBody))],
    model: InModel,
) -> dict[str, int]:
    """Count the prompt's tokens."""
    named = model.find(body.model)
    with body.own_names():
        chat = await aside(body.to_chat)
        ids = await model.prompt_ids(http, chat, named)
    return {"input_tokens": len(ids)}
