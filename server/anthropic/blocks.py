"""The content blocks of /v1/messages, and the chat's messages made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from engine.core.errors import InvalidRequestError, UnsupportedError
from engine.core.shown import shorten
from engine.text.chat_template import in_parts
from engine.text.fields.body import RequestBody, or_text

_KINDS = ("text", "image", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking")
_NEEDED: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "image": ("source",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    "tool_reference": ("tool_name",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
}
_ROLES = {"tool_use": "assistant", "thinking": "assistant", "redacted_thinking": "assistant"}
_ROLES |= dict.fromkeys(("image", "tool_result"), "user") | {"tool_reference": "tool"}


class CacheControl(RequestBody):
    """A mark on a block: the prompt up to its end is retained."""

    type: Literal["ephemeral"] = Field(description="Which kind of object this is.")
    ttl: Literal["5m", "1h"] = Field("5m", description="How long to keep it.")

    @property
    def seconds(self) -> float:
        return 300.0 if self.ttl == "5m" else 3_600.0


class MarkPosition(NamedTuple):
    """A mark's place, after the last of `num_blocks` blocks; places compare in order."""

    turn: int  # the message's number; 0 is the system prompt, after the tools
    num_blocks: int
    num_inner: int  # blocks within the last block's content


class ImageBlockSource(RequestBody):
    """Where an image of a block is: in it, or at an address."""

    type: Literal["base64", "url"] = Field(description="Which kind of object this is.")
    media_type: str = Field("image/png", description="The image's format; its bytes decide.")
    data: str | None = Field(None, description="The image's bytes in base64.")
    url: str | None = Field(None, description="The image's address.")

    @model_validator(mode="after")
    def _check(self) -> ImageBlockSource:
        if (self.data if self.type == "base64" else self.url) is None:
            raise ValueError(f"a source of type {self.type} needs {'data' if self.type == 'base64' else 'url'}")
        return self

    def for_chat(self) -> dict[str, Any]:
        url = f"data:{self.media_type};base64,{self.data}" if self.type == "base64" else self.url
        return {"type": "image_url", "image_url": {"url": url}}


class Block(RequestBody):
    """A content block. The fields that it needs depend on its type."""

    NO_OPS: ClassVar[frozenset[str]] = frozenset({"data", "signature"})  # of thoughts that are sent back
    HINTS: ClassVar[Mapping[str, tuple[Any, ...]]] = {"caller": ({"type": "direct"},), "citations": ([],)}

    type: Literal["text", "image", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking"] = (
        Field(description="Which kind of object this is.")
    )
    text: str | None = Field(None, description="The text.")
    source: ImageBlockSource | None = Field(None, description="The image.")
    thinking: str | None = Field(None, description="The reasoning's text, sent back.")
    id: str | None = Field(None, description="The identifier of the call or item.")
    name: str | None = Field(None, description="Its name.")
    input: dict[str, Any] | None = Field(None, description="The arguments of the call.")
    tool_use_id: str | None = Field(None, description="The call that this result belongs to.")
    tool_name: str | None = Field(None, description="The tool that this result of a search describes.")
    content: Blocks | None = Field(None, description="The text, or a list of parts.")
    is_error: bool = Field(False, description="Whether the tool failed.")
    cache_control: CacheControl | None = Field(None, description="Pin the prompt's K/V up to this block.")

    @model_validator(mode="before")
    @classmethod
    def _look_at_type(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind not in _KINDS:
            raise UnsupportedError(
                "messages", f"content of type {shorten(kind)!r} cannot be read; send text and images."
            )
        return data

    @model_validator(mode="after")
    def _check(self) -> Block:
        missing = [name for name in _NEEDED[self.type] if getattr(self, name) is None]
        if missing:
            raise ValueError(f"a block of type {self.type} needs {' and '.join(missing)}")
        return self


Blocks = Annotated[list[Block], BeforeValidator(or_text(in_parts), json_schema_input_type=str | list[Block])]


class Turn(RequestBody):
    """A message."""

    role: Literal["user", "assistant", "system"] = Field(description="Who speaks: user, assistant or system.")
    content: Blocks = Field(description="The text, or a list of parts.")

    @model_validator(mode="after")
    def _check(self) -> Turn:
        for block in self.content:
            if _ROLES.get(block.type, self.role) != self.role:
                raise ValueError(f"a block of type {block.type} has no place in a message of the {self.role}")
        return self


def marks_in(blocks: Sequence[Block], turn: int) -> Iterator[tuple[MarkPosition, CacheControl]]:
    """Yield the marks on blocks, and on blocks within tool results."""
    for num, block in enumerate(blocks, start=1):
        inner = block.content or ()
        for num_inner, part in enumerate(inner, start=1):
            if part.cache_control is not None:
                yield MarkPosition(turn, num, num_inner), part.cache_control
        if block.cache_control is not None:
            yield MarkPosition(turn, num, len(inner)), block.cache_control


def end_of(blocks: Sequence[Block], turn: int) -> MarkPosition:
    """Return the place after the last block."""
    return MarkPosition(turn, len(blocks), len(blocks[-1].content or ()) if blocks else 0)


def up_to(place: MarkPosition, blocks: Sequence[Block]) -> list[Block]:
    """Return the blocks before a place; the last one may be cut within."""
    kept = list(blocks[: place.num_blocks])
    if kept and kept[-1].content is not None:
        kept[-1] = kept[-1].model_copy(update={"content": kept[-1].content[: place.num_inner]})
    return kept


def joined_text(blocks: Sequence[Block], param: str) -> str:
    """Return the text of blocks. Raises InvalidRequestError for other blocks."""
    if any(block.type != "text" for block in blocks):
        raise InvalidRequestError(f"{param} has a block that is not text; send text blocks only.", param=param)
    return "\n".join(block.text or "" for block in blocks)


def _content(blocks: Sequence[Block]) -> str | list[dict[str, Any]]:
    """Return the text of blocks, or their parts in chat's form where images are among them."""
    if not any(block.type == "image" for block in blocks):
        return joined_text(blocks, "messages")
    for block in blocks:
        if block.type not in ("text", "image"):
            raise InvalidRequestError(
                "messages has a tool_result with a block that is no text or image.", param="messages"
            )
    return [
        {"type": "text", "text": block.text} if block.source is None else block.source.for_chat() for block in blocks
    ]


def referred_tools(turns: Iterable[Turn]) -> set[str]:
    """Return the names of the tools that results of a search describe."""
    parts = (part for turn in turns for block in turn.content for part in block.content or ())
    return {part.tool_name for part in parts if part.tool_name is not None}


def chat_messages(turns: Sequence[Turn], definitions: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the chat's messages; a tool result is one by itself. `definitions` are of the tools that some refer to."""
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of the tools used, by the id of the use
    for turn in turns:
        if turn.role == "assistant":
            messages.append(_assistant(turn, names))
            continue
        results = [block for block in turn.content if block.type == "tool_result"]
        words = [block for block in turn.content if block.type in ("text", "image")]
        messages += [_result(block, names, definitions) for block in results]
        if words or not results:
            messages.append({"role": turn.role, "content": _content(words)})
    return messages


def _assistant(turn: Turn, names: dict[str, str]) -> dict[str, Any]:
    texts = [block for block in turn.content if block.type == "text"]
    message: dict[str, Any] = {"role": "assistant", "content": joined_text(texts, "messages")}
    thoughts = [block.thinking for block in turn.content if block.thinking]
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    uses = [block for block in turn.content if block.type == "tool_use"]
    names.update((block.id or "", block.name or "") for block in uses)
    calls = [{"id": block.id, "function": {"name": block.name, "arguments": block.input}} for block in uses]
    return {**message, "tool_calls": calls} if calls else message


def _result(block: Block, names: Mapping[str, str], definitions: Mapping[str, str]) -> dict[str, Any]:
    use = block.tool_use_id or ""
    if use not in names:
        message = f"messages has a tool_result for {shorten(use)!r}, but no tool_use with that id stands before it; send it too."
        raise InvalidRequestError(message, param="messages")
    content = _content([_spelled_out(part, definitions) for part in block.content or ()])
    if block.is_error:  # templates cannot show it
        content = f"Error: {content}" if isinstance(content, str) else [{"type": "text", "text": "Error: "}, *content]
    return {
        "role": "tool",
        "tool_call_id": use,
        "name": names[use],
        "content": content,
    }


def _spelled_out(block: Block, definitions: Mapping[str, str]) -> Block:
    """Return the block; of a reference to a tool, the tool's definition."""
    if block.tool_name is None:
        return block
    if block.tool_name not in definitions:
        message = f"messages refers to a tool {shorten(block.tool_name)!r} that is not in tools; send it too."
        raise InvalidRequestError(message, param="messages")
    return block.model_copy(update={"type": "text", "text": definitions[block.tool_name]})


def last_marks(marks: Iterable[tuple[MarkPosition, CacheControl]]) -> dict[float, MarkPosition]:
    """Return the last place for each duration, unless a longer one covers it."""
    last: dict[float, MarkPosition] = {}
    for place, mark in marks:
        last[mark.seconds] = max(place, last.get(mark.seconds, place))
    return {
        seconds: place for seconds, place in last.items() if all(place > at for s, at in last.items() if s > seconds)
    }
