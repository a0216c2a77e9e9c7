"""The body of POST /v1/responses, and its translation to a chat; items.py has the items of its input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from engine.core.errors import InvalidRequestError
from engine.core.shown import shorten
from engine.text.fields.body import IdleFields, Integer, Refused, RequestBody, refused_field
from engine.text.fields.chat import with_unknown
from engine.text.fields.structured import Schema
from engine.text.fields.tools import Function
from server.answers.body import ChatBody
from server.openai.responses.items import Item, Items, chat_messages, full_name
from server.openai.translated import TranslatedBody

LOGPROBS = "message.output_text.logprobs"
# Of tools that Quire does not run, or of encrypted reasoning: they add nothing.
EMPTY_INCLUDES = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
MAX_PAIRS = 16  # of metadata


class NamespacedFunction(Function):
    type: Literal["function"] = Field(description="Which kind of object this is.")


class FunctionTool(Function):
    """One entry of `tools`: a function, or the functions of a namespace."""

    type: Literal["function", "namespace"] = Field(description="Which kind of object this is.")
    tools: list[NamespacedFunction] = Field(default_factory=list, description="The functions of a namespace.")

    def functions(self) -> list[tuple[str, str | None, Function]]:
        """Return the functions, each after its full name and its namespace."""
        if self.type == "function":
            return [(self.name, None, self)]
        return [(full_name(tool.name, self.name), self.name, tool) for tool in self.tools]


def _for_chat(function: Function, name: str) -> dict[str, Any]:
    fields = function.model_dump(exclude_unset=True, exclude={"type", "tools"})
    return {"type": "function", "function": {**fields, "name": name}}


class AllowedTools(RequestBody):
    """The tools that may be called; None is all, `named` is one call of one tool."""

    mode: Literal["none", "auto", "required", "named"]
    names: frozenset[str] | None = None

    def for_chat(self) -> str | dict[str, Any]:
        if self.mode != "named" or self.names is None:
            return self.mode
        return {"type": "function", "function": {"name": min(self.names)}}

    def document(self) -> str | dict[str, Any]:
        """Return the choice as the answer repeats it."""
        if self.names is None:
            return self.mode
        tools = [{"type": "function", "name": name} for name in sorted(self.names)]
        return tools[0] if self.mode == "named" else {"type": "allowed_tools", "mode": self.mode, "tools": tools}


def _as_choice(value: Any) -> Any:
    if value in ("none", "auto", "required"):
        return AllowedTools(mode=value)
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "function" and isinstance(value.get("name"), str):
        return AllowedTools(mode="named", names=frozenset({value["name"]}))
    if kind == "allowed_tools" and value.get("mode") in ("auto", "required"):
        tools = value.get("tools")
        named = [tool.get("name") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
        names = frozenset(name for name in named if isinstance(name, str))
        if names:
            return AllowedTools(mode=value["mode"], names=names)
    raise ValueError(
        'it must be "none", "auto", "required", {"type": "function", "name": "..."} or {"type": "allowed_tools", '
        '"mode": "auto", "tools": [{"type": "function", "name": "..."}]}'
    )


class TextFormat(RequestBody):
    """OpenAI's response_format, with the schema's fields beside the type."""

    type: Literal["text", "json_object", "json_schema"] = Field("text", description="Which kind of object this is.")
    name: str | None = Field(None, description="Its name.")
    description: str | None = Field(None, description="What it is for; the model reads it.")
    schema_: Schema | None = Field(None, alias="schema", description="A JSON schema.")
    strict: bool | None = Field(None, description="Enforce the schema while the model generates.")

    @model_validator(mode="after")
    def _check(self) -> TextFormat:
        if self.schema_ is not None and self.type != "json_schema":
            raise refused_field("schema", f"has no meaning with type {self.type}.")
        return self

    def for_chat(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        named = {"name", "description", "schema_", "strict"}
        return {"type": self.type, "json_schema": self.model_dump(include=named, by_alias=True, exclude_none=True)}


class TextConfig(RequestBody):
    HINTS: ClassVar[Mapping[str, tuple[Any, ...]]] = {"verbosity": ("medium",)}

    format: TextFormat = Field(default_factory=TextFormat, description="The form of the answer's text.")


class ReasoningConfig(RequestBody):
    """The summary `auto` is the default: none, as reasoning is sent itself."""

    HINTS: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "summary": ("auto",),
        "generate_summary": ("auto",),
        "context": ("auto",),
        "mode": ("standard",),
    }

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="How much the model reasons: none, minimal, low, medium, high."
    )


class ResponseStreamOptions(RequestBody):
    NO_OPS: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})


class InputBody(TranslatedBody):
    """The fields of the prompt, which /v1/responses/input_tokens has too."""

    # A limit on hosted tools has no effect, as there are none.
    NO_OPS: ClassVar[frozenset[str]] = TranslatedBody.NO_OPS | {"max_tool_calls"}
    # Ways to shorten a conversation: without them, one that is too long is a 400.
    HINTS: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **TranslatedBody.HINTS,
        "context_management": ([],),
        "truncation": ("disabled",),
    }
    UNSUPPORTED: ClassVar[Mapping[str, Refused]] = {
        **TranslatedBody.UNSUPPORTED,
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "n_predict"), Refused((), "send max_output_tokens")),
        "background": Refused((False,), "answers are not made in the background; leave it out, and stream"),
        "conversation": Refused((), "send previous_response_id, or the conversation in input"),
        "logprobs": Refused((False,), f'send include: ["{LOGPROBS}"]'),
        "messages": Refused((), "send input"),
        "moderation": Refused(),
        "n": Refused((1,)),
        "prompt": Refused(),
        "reasoning_effort": Refused((), "send reasoning: {effort: ...}"),
        "response_format": Refused((), "send text: {format: ...}"),
        "stop_sequences": Refused(([],), "send stop"),
        "system": Refused((), "send instructions"),
    }
    IDLE: ClassVar[IdleFields] = {
        **TranslatedBody.IDLE,
        "reasoning.effort": lambda body, limits: (
            body.reasoning.effort not in (None, "none") and not limits.chat_format.takes_effort
        ),
    }
    OWN_TOOLS = ("function", "namespace", None)
    OWN_NAMES: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }

    input: Items = Field(description="The user's turn as text, or a list of items of a conversation.")
    instructions: str | None = Field(
        None, description="The system message; it is not carried over from an earlier response."
    )
    previous_response_id: str | None = Field(
        None, description="A stored response whose conversation this one continues."
    )
    tools: list[FunctionTool] = Field(default_factory=list, description="The tools that the model may call.")
    tool_choice: Annotated[AllowedTools, BeforeValidator(_as_choice, json_schema_input_type=str | dict[str, Any])] = (
        Field(default_factory=lambda: AllowedTools(mode="auto"), description="none, auto, required, or one tool.")
    )
    parallel_tool_calls: bool = Field(True, description="Whether one answer may contain several calls.")
    text: TextConfig = Field(default_factory=TextConfig, description="The form of the answer's text.")
    reasoning: ReasoningConfig = Field(
        default_factory=ReasoningConfig, description="How much the model reasons before it answers."
    )

    @model_validator(mode="before")
    @classmethod
    def _look_at_parts(cls, data: Any) -> Any:
        return with_unknown(data, "input", "content", "output", "summary")

    @model_validator(mode="after")
    def _check_names(self) -> InputBody:
        unknown = (self.tool_choice.names or frozenset()) - {name for name, _, _ in self.functions}
        if unknown:
            name = shorten(min(unknown))
            message = f"tool_choice names {name!r}, which is not one of tools; send that tool, or leave it out."
            raise InvalidRequestError(message, param="tool_choice")
        return self

    @property
    def functions(self) -> list[tuple[str, str | None, Function]]:
        """The functions of `tools`, each after its full name and its namespace."""
        return [function for tool in self.tools for function in tool.functions()]

    def to_chat(self, earlier: Sequence[Item]) -> ChatBody:
        """Return the chat, after earlier items; earlier instructions are dropped."""
        messages = chat_messages([*earlier, *self.input])
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        choice = self.tool_choice
        is_any = choice.names is None or choice.mode == "named"
        tools = [
            _for_chat(function, name) for name, _, function in self.functions if is_any or name in (choice.names or ())
        ]
        return self.chat_body(
            {
                "messages": messages,
                "tools": tools,
                "tool_choice": choice.for_chat() if tools or choice.mode == "required" else None,
                "parallel_tool_calls": self.parallel_tool_calls,
                "response_format": self.text.format.for_chat(),
                "reasoning_effort": self.reasoning.effort,
            }
        )


class ResponsesBody(InputBody):
    """The request."""

    IDLE: ClassVar[IdleFields] = {**InputBody.IDLE, "stream_options": lambda body, _: not body.stream}
    ANSWERED: ClassVar[Mapping[str, str]] = {
        "max_tokens": "max_output_tokens",
        "logprobs": "tells_logprobs",
        "top_logprobs": "top_logprobs",
    }

    max_output_tokens: Integer | None = Field(
        None, ge=1, description="The most tokens to generate, reasoning included."
    )
    include: list[str] = Field(
        default_factory=list, description="Further parts of the answer, such as message.output_text.logprobs."
    )  # only LOGPROBS has an effect
    top_logprobs: Integer | None = Field(
        None, ge=0, description="How many of the most probable tokens to list at each position."
    )
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] = Field(
        default_factory=dict, max_length=MAX_PAIRS, description="Kept with the object; no effect on the answer."
    )
    store: bool | None = Field(None, description="Whether the response can be read and continued later.")
    stream_options: ResponseStreamOptions | None = Field(None, description="What else a stream contains.")

    @model_validator(mode="after")
    def _check(self) -> ResponsesBody:
        if self.top_logprobs and not self.tells_logprobs:
            message = f'top_logprobs needs include: ["{LOGPROBS}"].'
            raise InvalidRequestError(message, param="top_logprobs")
        return self

    @property
    def tells_logprobs(self) -> bool:
        return LOGPROBS in self.include

    def ignored_fields(self) -> list[str]:
        """Return also the unknown values of `include`."""
        unknown = [ascii(shorten(name))[1:-1] for name in self.include if name not in EMPTY_INCLUDES | {LOGPROBS}]
        return super().ignored_fields() + [f"include.{name}" for name in unknown]
