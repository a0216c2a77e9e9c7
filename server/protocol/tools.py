"""Tools in a request: what may be called, whether it must be, and calls of earlier turns. Names as OpenAI has them."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from engine.core.errors import InvalidRequestError
from server.errors import shorten
from server.protocol.base import RequestBody
from server.tools.offered import OfferedTool


class Function(RequestBody):
    """What a tool does. Whatever else it holds is for the chat template to read.

    `strict` makes every call of it valid; else arguments are what the model writes, where a call is its own choice.
    """

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool = False

    @model_validator(mode="after")
    def _check_parameters(self) -> Function:
        kind = self.parameters.get("type", "object")
        if kind != "object":
            raise ValueError(f'parameters is a schema of type {shorten(json.dumps(kind))}; it must be "object"')
        return self

    def offered(self) -> OfferedTool:
        """As the grammars of calls need it."""
        return OfferedTool(self.name, self.parameters, self.strict)


class Tool(RequestBody):
    """One entry of `tools`."""

    type: Literal["function"]
    function: Function


def check_tools(tools: list[Tool] | None) -> None:
    """Raise InvalidRequestError for a list that is empty or has a name twice."""
    if tools is None:
        return
    if not tools:
        raise InvalidRequestError("tools is empty; give at least one, or leave it out.", param="tools")
    twice = next((name for name, count in Counter(tool.function.name for tool in tools).items() if count > 1), None)
    if twice is not None:
        raise InvalidRequestError(f"tools has two functions with the name {twice!r}; rename one.", param="tools")


class ToolChoice(NamedTuple):
    """Whether the model may or must call; `name` is the one tool that it must."""

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


Choice = Annotated[
    Any, BeforeValidator(_as_choice, json_schema_input_type=Literal["none", "auto", "required"] | dict[str, Any])
]


class CalledFunction(RequestBody):
    name: str
    arguments: str | dict[str, Any] = ""

    def arguments_object(self) -> Any:
        """As chat templates expect them; what is not JSON stays the string that the model once wrote."""
        if not isinstance(self.arguments, str):
            return self.arguments
        try:
            return json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):  # the latter of brackets, thousands deep
            return self.arguments


class ToolCall(RequestBody):
    """A call in an assistant's message of an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function = {"name": self.function.name, "arguments": self.function.arguments_object()}
        return {"id": self.id, "type": self.type, "function": function}
