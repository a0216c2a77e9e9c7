"""The fields of tools, tool choice and earlier tool calls. Pure data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from engine.core.errors import InvalidRequestError
from engine.core.shown import shorten
from engine.text.fields.body import Refused, RequestBody
from engine.text.tools.tool_format import OfferedTool

# OpenAI allows 64 characters and Anthropic 128, which clients use for tools of MCP servers.
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


class Function(RequestBody):
    """A tool's function.

    `strict` makes every call of it valid; otherwise a call that the model may leave out has the arguments it writes.
    """

    FOR_TEMPLATE = True

    name: ToolName = Field(description="Its name.")
    description: str | None = Field(None, description="What it is for; the model reads it.")
    parameters: dict[str, Any] = Field(default_factory=dict, description="A JSON schema of the arguments.")
    strict: bool = Field(False, description="Enforce the schema while the model generates.")

    @model_validator(mode="after")
    def _check_parameters(self) -> Function:
        kind = self.parameters.get("type", "object")
        if kind != "object":
            raise ValueError(f'parameters is a schema of type {shorten(json.dumps(kind))}; it must be "object"')
        return self

    def offered(self) -> OfferedTool:
        """Return the tool as the grammars of calls need it."""
        return OfferedTool(self.name, self.parameters, self.strict)


class Tool(RequestBody):
    """One entry of `tools`."""

    UNSUPPORTED: ClassVar[Mapping[str, Refused]] = {"strict": Refused((False,), "send it in function")}
    FOR_TEMPLATE = True

    type: Literal["function"] = Field(description="Which kind of object this is.")
    function: Function = Field(description="The function.")
    defer_loading: bool = Field(False, description="Leave the tool out of the prompt: a message describes it.")


def check_tools(tools: list[Tool] | None) -> None:
    """Raise InvalidRequestError for two tools with one name."""
    twice = next(
        (name for name, count in Counter(tool.function.name for tool in tools or ()).items() if count > 1), None
    )
    if twice is not None:
        raise InvalidRequestError(f"tools has two functions with the name {twice!r}; rename one.", param="tools")


class ToolChoice(NamedTuple):
    """Whether the model may or must call a tool; `name` is the one that it must call."""

    mode: Literal["none", "auto", "required", "named"]
    name: str | None = None


def _as_choice(value: Any) -> Any:
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ValueError('it must be "none", "auto", "required" or {"type": "function", "function": {"name": "..."}}')
    return ToolChoice("named", name)


ToolChoiceField = Annotated[
    Any, BeforeValidator(_as_choice, json_schema_input_type=Literal["none", "auto", "required"] | dict[str, Any])
]


class CalledFunction(RequestBody):
    NO_OPS: ClassVar[frozenset[str]] = frozenset({"parsed_arguments"})

    name: str = Field(description="Its name.")
    arguments: str | dict[str, Any] = Field("", description="The arguments as JSON.")

    def arguments_text(self) -> str:
        """Return them as JSON, as the model wrote it."""
        return (
            self.arguments or "{}"
            if isinstance(self.arguments, str)
            else json.dumps(self.arguments, ensure_ascii=False)
        )

    def arguments_object(self) -> Any:
        """Return them as chat templates expect them; text that is not JSON stays."""
        if not isinstance(self.arguments, str):
            return self.arguments
        try:
            return json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):  # RecursionError: brackets, thousands deep
            return self.arguments


class ToolCall(RequestBody):
    """A call in an assistant's message of an earlier turn."""

    NO_OPS: ClassVar[frozenset[str]] = frozenset({"index"})

    id: str | None = Field(None, description="The identifier of the call or item.")
    type: Literal["function"] = Field("function", description="Which kind of object this is.")
    function: CalledFunction = Field(description="The function.")

    def for_template(self, *, as_text: bool = False) -> dict[str, Any]:
        """Return the call as chat templates expect it: most want an object of arguments, some its JSON."""
        arguments = self.function.arguments_text() if as_text else self.function.arguments_object()
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}
