"""The items of `input` of /v1/responses, and the chat's messages made of them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from engine.core.errors import InvalidRequestError, UnsupportedError
from engine.core.shown import shorten
from engine.text.fields.body import RequestBody, or_text
from engine.text.fields.chat import Content, join_parts

_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}  # type -> the field of its text
_THOUGHT_PARTS = {"reasoning_text": "text", "summary_text": "text"}


_words = partial(join_parts, kinds=_TEXT_PARTS, param="input", image="input_image")
_thoughts = partial(join_parts, kinds=_THOUGHT_PARTS, param="input")
Words = Annotated[Content, BeforeValidator(_words, json_schema_input_type=Content)]
Thoughts = Annotated[str, BeforeValidator(_thoughts, json_schema_input_type=list[dict[str, Any]])]


class Item(RequestBody):
    """One item of `input`. The fields that it needs depend on its type; a reference stands for a stored item."""

    NO_OPS: ClassVar[frozenset[str]] = frozenset({"status", "parsed_arguments"})

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] = Field(
        "message", description="Which kind of object this is."
    )
    id: str | None = Field(None, description="The identifier of the call or item.")
    role: Literal["system", "developer", "user", "assistant"] | None = Field(
        None, description="Who speaks: system, developer, user or assistant."
    )
    content: Words | None = Field(None, description="The text, or a list of parts.")
    call_id: str | None = Field(None, description="The call that this belongs to.")
    name: str | None = Field(None, description="Its name.")
    namespace: str | None = Field(None, description="The namespace of the function.")
    arguments: str | None = Field(None, description="The arguments as JSON.")
    output: Words | None = Field(None, description="The tool's result.")
    summary: Thoughts = Field("", description="The summary of the reasoning.")
    thoughts: Thoughts = Field("", description="The reasoning's text.")  # the content of a reasoning item

    @model_validator(mode="before")
    @classmethod
    def _look_at_type(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise ValueError('items must be objects, such as {"role": "user", "content": "..."}')
        if data.get("type") is None and isinstance(data.get("id"), str) and data.keys() <= {"type", "id"}:
            return {"type": "item_reference", "id": data["id"]}
        kind = data.get("type", "message")
        if isinstance(kind, str) and kind not in (*_ID_PREFIXES, "item_reference"):
            raise UnsupportedError(
                "input", f"items of type {shorten(kind)!r} cannot be read; send {', '.join(_ID_PREFIXES)}."
            )
        if kind != "reasoning":
            return data
        return {name: value for name, value in data.items() if name != "content"} | {"thoughts": data.get("content")}

    @model_validator(mode="after")
    def _check(self) -> Item:
        needed: dict[str, tuple[str, ...]] = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "reasoning": (),
            "item_reference": ("id",),
        }
        missing = [name for name in needed[self.type] if getattr(self, name) is None]
        if missing:
            raise ValueError(f"an item of type {self.type} needs {' and '.join(missing)}")
        return self

    def document(self) -> dict[str, Any]:
        """Return the item as it is stored and listed: with an id, in parts."""
        head = {"type": self.type, "id": self.id or f"{_ID_PREFIXES[self.type]}_{uuid.uuid4().hex}"}
        if self.type == "function_call":
            call = {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}
            space = {} if self.namespace is None else {"namespace": self.namespace}
            return {**head, **call, **space, "status": "completed"}
        if self.type == "function_call_output":
            return {**head, "call_id": self.call_id, "output": _listed(self.output), "status": "completed"}
        if self.type == "reasoning":
            parts = [{"type": "reasoning_text", "text": self.thoughts}] if self.thoughts else []
            summary = [{"type": "summary_text", "text": self.summary}] if self.summary else []
            return {**head, "summary": summary, "content": parts}
        content = _listed(self.content)
        if self.role == "assistant":
            content = [{"type": "output_text", "text": content, "annotations": []}]
        elif isinstance(content, str):
            content = [{"type": "input_text", "text": content}]
        return {**head, "role": self.role, "status": "completed", "content": content}


def _listed(content: Content | None) -> Content | None:
    """Return content as items have it: a text, or parts with images among them."""
    if content is None or isinstance(content, str):
        return content
    return [
        {"type": "input_text", "text": part["text"]}
        if part["type"] == "text"
        else {"type": "input_image", "image_url": part["image_url"]["url"], "detail": part["image_url"]["detail"]}
        for part in content
    ]


_as_items = or_text(lambda text: [{"role": "user", "content": text}])
Items = Annotated[list[Item], BeforeValidator(_as_items, json_schema_input_type=str | list[Item]), Field(min_length=1)]


def chat_messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return messages; adjacent reasoning, text and calls are one of the assistant."""
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of calls, by their id
    for item in items:
        if item.type == "function_call_output":
            messages.append(_result(item, names))
        elif item.type == "message" and item.role != "assistant":
            messages.append({"role": item.role, "content": item.content})
        else:
            if not messages or not _can_go_on(messages[-1], item):
                messages.append({"role": "assistant", "content": ""})
            _go_on(messages[-1], item, names)
    return messages


def _result(item: Item, names: dict[str, str]) -> dict[str, Any]:
    assert item.call_id is not None
    if item.call_id not in names:
        raise InvalidRequestError(
            f"input has the output of a call {shorten(item.call_id)!r}, but no function_call with that call_id stands "
            "before it; send the call too, or previous_response_id.",
            param="input",
        )
    return {"role": "tool", "tool_call_id": item.call_id, "name": names[item.call_id], "content": item.output}


def _can_go_on(turn: dict[str, Any], item: Item) -> bool:
    """Return whether an item of the assistant belongs to the last message."""
    if turn["role"] != "assistant":
        return False
    if item.type == "function_call":
        return True
    is_fresh = not turn["content"] and "tool_calls" not in turn
    return is_fresh if item.type == "message" else is_fresh and "reasoning_content" not in turn


def _go_on(turn: dict[str, Any], item: Item, names: dict[str, str]) -> None:
    if item.type == "reasoning":
        if thoughts := item.thoughts or item.summary:
            turn["reasoning_content"] = thoughts
    elif item.type == "message":
        turn["content"] = item.content
    else:
        assert item.call_id is not None
        assert item.name is not None
        name = names[item.call_id] = full_name(item.name, item.namespace)
        call = {"id": item.call_id, "type": "function", "function": {"name": name, "arguments": item.arguments}}
        turn.setdefault("tool_calls", []).append(call)


def full_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model calls a function, as MCP's clients spell those of a server."""
    return name if namespace is None else f"{namespace}__{name}"
