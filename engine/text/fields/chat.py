"""The fields of a conversation: messages, tools, and how to answer. Pure data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from engine.core.errors import InvalidRequestError, UnsupportedError
from engine.core.shown import shorten
from engine.text.fields.body import IdleFields, Integer, Refused, RequestBody, neither_text_nor
from engine.text.fields.sampling import SamplingFields
from engine.text.fields.tools import Tool, ToolCall, ToolChoice, ToolChoiceField, check_tools

# Conversations with more take longer than 1 ms to render.
_MANY_MESSAGES = 50
_MANY_TOOLS = 8
_MANY_CHARS = 100_000
_PLAIN_ROLES = ("user", "assistant", "system")
_DETAILS = ("auto", "low", "high", "original")
_LOW_DETAIL = 512  # pixels, as OpenAI has it
_SHOWN_ROLES = ("user", "tool", "function")  # whose messages may have images

Content = str | list[dict[str, Any]]


class ImageSource(NamedTuple):
    """An image as a client names it."""

    url: str
    longest: int | None = None  # side that is wanted, in pixels


def join_parts(content: Any, kinds: Mapping[str, str], param: str, image: str = "") -> Any:
    """Return the joined text of content in parts; `kinds` maps types to fields, `image` is the type of an image.

    With an image among them the parts are returned, in chat's form.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise neither_text_nor(list)  # a union would name its members as fields
    parts: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if image and kind == image:
            parts.append(_image_part(part))
            continue
        if isinstance(kind, str) and kind not in kinds:
            served = "text and images" if image else "text"
            raise UnsupportedError(param, f"content of type {shorten(kind)!r} cannot be read; send {served} only.")
        text = part.get(kinds[kind]) if isinstance(kind, str) else None
        if not isinstance(text, str):
            raise ValueError(f'parts must look like {{"type": "{next(iter(kinds))}", "text": "..."}}')
        parts.append({"type": "text", "text": text})
    return parts if any(part["type"] == "image_url" for part in parts) else "\n".join([part["text"] for part in parts])


_PART_FIELDS = frozenset({"type", "text", "refusal", "image_url", "url", "detail", "annotations", "logprobs"})


def with_unknown(data: Any, name: str, *fields: str) -> Any:
    """Return a body with the unknown fields of parts, in these fields of its turns, as fields of the body itself.

    Parts are joined to texts; so these fields are reported all the same.
    """
    turns = data.get(name) if isinstance(data, dict) else None
    if not isinstance(turns, list):
        return data
    contents = [(f"{name}.{field}", turn.get(field)) for turn in turns if isinstance(turn, dict) for field in fields]
    found = (unknown for at, parts in contents if isinstance(parts, list) for unknown in _unknown(parts, at))
    return {**data, **dict.fromkeys(found, True)}


def _unknown(parts: list[Any], at: str) -> Iterator[str]:
    for part in parts:
        if isinstance(part, dict):
            yield from (
                f"{at}.{name}" for name, value in part.items() if name not in _PART_FIELDS and value is not None
            )
            yield from _unknown([part.get("image_url")], f"{at}.image_url")


def _image_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return an image in chat's form; the address is an object's or, as in Responses, stands beside the detail."""
    found = part.get("image_url")
    given = found if isinstance(found, Mapping) else {**part, "url": found}
    url, detail = given.get("url"), given.get("detail") or "auto"
    if not isinstance(url, str):
        raise ValueError("an image needs image_url, an address such as data:image/png;base64,...")
    if detail not in _DETAILS:
        raise ValueError(f"an image has detail {shorten(repr(detail))}; it must be {', '.join(_DETAILS)}")
    return {"type": "image_url", "image_url": {"url": url, "detail": detail}}


_as_content = partial(join_parts, kinds={"text": "text"}, param="messages", image="image_url")


class Message(RequestBody):
    """One turn of a conversation."""

    FOR_TEMPLATE = True
    UNSUPPORTED: ClassVar[Mapping[str, Refused]] = {  # templates would pass over what was said there
        "images": Refused(([],), "send images in parts of content"),
        "function_call": Refused((), "send tool_calls"),
        "refusal": Refused(("",), "send its text as content"),
        "audio": Refused((), "send its transcript as content"),
    }

    role: Literal["system", "developer", "user", "assistant", "tool", "function"] = Field(
        description="Who speaks: system, developer, user, assistant or tool."
    )
    content: Annotated[Content, BeforeValidator(_as_content, json_schema_input_type=Content)] = Field(
        "", description="The text, or a list of parts."
    )
    tool_calls: list[ToolCall] = Field(default_factory=list, description="The calls that an earlier answer made.")

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.role in ("system", "developer", "user") and "content" not in self.model_fields_set:
            raise ValueError(f"a message of the {self.role} needs content")
        if not isinstance(self.content, str) and self.role not in _SHOWN_ROLES:
            raise ValueError(f"a message of the {self.role} has no place for images; send them in one of the user")
        return self

    @property
    def text(self) -> str:
        """The text of all parts."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join([part["text"] for part in self.content if part["type"] == "text"])

    @property
    def images(self) -> list[ImageSource]:
        """The images of all parts."""
        if isinstance(self.content, str):
            return []
        found = [part["image_url"] for part in self.content if part["type"] == "image_url"]
        return [ImageSource(each["url"], _LOW_DETAIL if each["detail"] == "low" else None) for each in found]

    def for_template(self, *, arguments_as_text: bool = False) -> dict[str, Any]:
        """Return the message as chat templates expect it."""
        content = self.content
        if not isinstance(content, str):
            content = [{"type": "image"} if part["type"] == "image_url" else part for part in content]
        role = "tool" if self.role == "function" else self.role  # its older name, which templates leave out
        shown = {**(self.model_extra or {}), "role": role, "content": content}
        if "reasoning" in shown:
            shown.setdefault("reasoning_content", shown["reasoning"])
        if self.tool_calls:
            shown["tool_calls"] = [call.for_template(as_text=arguments_as_text) for call in self.tool_calls]
        return shown


class Conversation(RequestBody):
    """A conversation, and how to make a prompt of it."""

    OWN_TOOLS = ("function", None)

    messages: list[Message] = Field(min_length=1, description="The conversation, oldest turn first.")
    tools: list[Tool] | None = Field(None, description="The tools that the model may call.")
    add_generation_prompt: bool | None = Field(None, description="Whether the template opens the assistant's turn.")
    continue_final_message: bool = Field(False, description="Continue the last message instead of opening a new turn.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Further variables for the chat template, such as enable_thinking."
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="none, minimal, low, medium, high: for the chat template, or as a budget of reasoning tokens."
    )
    enable_thinking: bool | None = Field(
        None, description="false is reasoning_effort none; true is the chat template's variable of this name."
    )
    mm_processor_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="min_pixels and max_pixels that Qwen's image processor makes images of."
    )

    @model_validator(mode="before")
    @classmethod
    def _look_at_parts(cls, data: Any) -> Any:
        data = with_unknown(data, "messages", "content")
        asked = data.get("enable_thinking") if isinstance(data, dict) else None
        if asked is False and data.get("reasoning_effort") is None:
            return {**data, "reasoning_effort": "none"}
        variables = (data.get("chat_template_kwargs") or {}) if asked is True else None
        if isinstance(variables, dict):
            return {**data, "chat_template_kwargs": {"enable_thinking": True, **variables}}
        return data

    @model_validator(mode="after")
    def _check_conversation(self) -> Conversation:
        if self.tools:
            check_tools(self.tools)
        if self.continue_final_message:
            self._check_continued()
        return self

    def _check_continued(self) -> None:
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
        if self.messages[-1].tool_calls:  # they stand behind the content, where the prompt would end
            raise InvalidRequestError(
                "continue_final_message continues the content of the last message, which has tool_calls behind it; leave "
                "one of them out.",
                param="continue_final_message",
            )

    @property
    def num_chars(self) -> int:
        """The characters of all messages."""
        return sum([len(message.text) for message in self.messages])

    @property
    def images(self) -> list[ImageSource]:
        """The images of all messages, in order."""
        return [image for message in self.messages for image in message.images]

    @property
    def is_long(self) -> bool:
        """True if it takes more than a few milliseconds to render."""
        return (
            len(self.messages) > _MANY_MESSAGES or len(self.tools or ()) > _MANY_TOOLS or self.num_chars > _MANY_CHARS
        )

    @property
    def is_plain(self) -> bool:
        """True if every template can show the roles: user, assistant, a system prompt."""
        return all(
            message.role in _PLAIN_ROLES and not message.tool_calls and (message.role != "system" or not index)
            for index, message in enumerate(self.messages)
        )

    @property
    def shown_tools(self) -> list[Tool]:
        """The tools that the prompt describes."""
        return self.tools or []


class ChatFields(SamplingFields, Conversation):
    """A conversation to answer; `top_logprobs` counts alternatives."""

    IDLE: ClassVar[IdleFields] = {
        **SamplingFields.IDLE,
        "reasoning_effort": lambda body, limits: (
            body.reasoning_effort != "none" and not limits.chat_format.takes_effort
        ),
        "enable_thinking": lambda body, limits: body.enable_thinking and not limits.chat_format.takes_effort,
        "thinking_token_budget": lambda _, limits: limits.chat_format.tag_ids is None,
        "mm_processor_kwargs": lambda body, _: bool(body.mm_processor_kwargs) and not body.images,
    }

    logprobs: bool = Field(False, description="Return log probabilities of the answer's tokens.")
    top_logprobs: Integer | None = Field(
        None, ge=0, description="How many of the most probable tokens to list at each position."
    )
    add_special_tokens: bool = Field(False, description="Whether the tokenizer adds its special tokens, such as BOS.")
    tool_choice: ToolChoiceField = Field(None, description="none, auto, required, or one tool.")
    parallel_tool_calls: bool = Field(True, description="Whether one answer may contain several calls.")
    thinking_token_budget: Integer | None = Field(None, ge=0, description="Reasoning ends after this many tokens.")

    @model_validator(mode="after")
    def _check_chat(self) -> ChatFields:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
        if self.tool_choice is not None:
            self._check_tool_choice()
        return self

    def _check_tool_choice(self) -> None:
        choice, names = self.choice, [tool.function.name for tool in self.tools or []]
        if not names and choice.mode != "none":
            raise InvalidRequestError("tool_choice needs tools; send them, or leave it out.", param="tool_choice")
        if choice.name is not None and choice.name not in names:
            raise InvalidRequestError(
                f"tool_choice names {shorten(choice.name)!r}, which is not one of tools; they are {shorten(', '.join(names))}.",
                param="tool_choice",
            )

    @property
    def choice(self) -> ToolChoice:
        """The tool choice; "auto" without tools is "none"."""
        choice = self.tool_choice or ToolChoice("auto")
        assert isinstance(choice, ToolChoice)
        return ToolChoice("none") if choice.mode == "auto" and not self.tools else choice

    @property
    def shown_tools(self) -> list[Tool]:
        """The tools that the prompt describes; none, if the model is to call none."""
        return self.tools if self.tools and self.choice.mode != "none" else []
