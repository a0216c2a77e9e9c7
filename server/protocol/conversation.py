"""Messages and what makes a prompt of them; /v1/chat/completions and /tokenize take the same."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from engine.core.errors import InvalidRequestError, shorten
from engine.text.tools.prompting import spell_out
from server.errors import unsupported
from server.protocol.base import RequestBody
from server.protocol.limits import Limits
from server.protocol.tools import Tool, ToolCall, check_tools, without_hosted

# What takes about 1 ms to render.
_MANY_MESSAGES = 50
_MANY_TOOLS = 8
_MANY_CHARS = 100_000


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
    """One turn of a conversation. What else it holds (name, tool_call_id, ...) is for the chat template to read."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str, BeforeValidator(_as_text, json_schema_input_type=str | list[dict[str, Any]])] = ""
    tool_calls: list[ToolCall] = Field(default_factory=list)

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it, thoughts of earlier turns under the name that they know."""
        shown = {**(self.model_extra or {}), "role": self.role, "content": self.content}
        if "reasoning" in shown:
            shown.setdefault("reasoning_content", shown["reasoning"])
        if self.tool_calls:
            shown["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return shown


class Conversation(RequestBody):
    """A conversation, and how to make a prompt of it."""

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _drop_hosted_tools(cls, data: Any) -> Any:
        return without_hosted(data, ("function", None))

    @model_validator(mode="after")
    def _check_conversation(self) -> Conversation:
        check_tools(self.tools)
        if not self.continue_final_message:
            return self
        if self.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt contradict each other; set only one.",
                param="continue_final_message",
            )
        last = self.messages[-1].role if self.messages else "none at all"  # /tokenize may have a prompt instead
        if last != "assistant":
            raise InvalidRequestError(
                f"continue_final_message needs a last message of role assistant, not {last}.",
                param="continue_final_message",
            )
        return self

    @property
    def is_long(self) -> bool:
        """True if it takes more than a few milliseconds to render."""
        return (
            len(self.messages) > _MANY_MESSAGES
            or len(self.tools or ()) > _MANY_TOOLS
            or sum(len(message.content) for message in self.messages) > _MANY_CHARS
        )

    def shown_tools(self) -> list[Tool]:
        """The tools that the model is told of."""
        return self.tools or []

    def template_kwargs(self, limits: Limits) -> dict[str, Any]:  # noqa: ARG002 - for those who know more
        """What else the template is told."""
        return self.chat_template_kwargs

    def render(self, limits: Limits) -> str:
        """The prompt's text. Raises InvalidRequestError where the template refuses, or what it is given cannot fit."""
        limits.check_num_chars(sum(len(message.content) for message in self.messages), "messages")
        wants_prompt = self.add_generation_prompt
        messages = limits.chat_format.roles.fit([message.for_template() for message in self.messages])
        tools = [tool.model_dump(exclude_unset=True) for tool in self.shown_tools()]
        if not limits.chat_format.shows_tools:
            messages, tools = spell_out(messages, tools), []
        return limits.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=not self.continue_final_message if wants_prompt is None else wants_prompt,
            continue_final_message=self.continue_final_message,
            template_kwargs=self.template_kwargs(limits),
        )
