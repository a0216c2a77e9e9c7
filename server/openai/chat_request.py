"""ChatBody, which all APIs with messages use, and its way to the engine.

Event loop; long texts are rendered and encoded on other threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator

from engine.core.errors import ClientError, InvalidRequestError
from engine.core.types import Request
from engine.text.chat_preprocessor import PreparedChat
from engine.text.fields.base import Integer, Refused
from engine.text.fields.chat import ChatFields
from engine.text.limits import num_common
from server.context import Context, aside
from server.errors import ApiError
from server.openai.sampling import HINTS, NO_OPS, UNSUPPORTED, SamplingBody
from server.respond import engine_requests


class ChatBody(SamplingBody, ChatFields):
    """The request of /v1/chat/completions, which other APIs are translated to."""

    NO_OPS: ClassVar[frozenset[str]] = NO_OPS | {"prediction"}
    HINTS: ClassVar[Mapping[str, tuple[Any, ...]]] = {**HINTS, "verbosity": ("medium",)}
    UNSUPPORTED: ClassVar[Mapping[str, Refused]] = {
        **UNSUPPORTED,
        **dict.fromkeys(("audio", "functions", "moderation", "web_search_options"), Refused()),
        "best_of": Refused((1,), "answers are ranked by /v1/completions only; send n to have several"),
        "echo": Refused((False,)),
        "function_call": Refused(("none",)),
        "modalities": Refused((["text"],)),
    }

    max_completion_tokens: Integer | None = Field(None, ge=1)
    max_tokens: Integer | None = Field(None, ge=1)
    include_reasoning: bool = True

    @model_validator(mode="after")
    def _check_max_tokens(self) -> ChatBody:
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise InvalidRequestError(
                f"max_tokens is {both[0]} and max_completion_tokens {both[1]}; they mean the same, send one.",
                param="max_tokens",
            )
        return self

    @property
    def asked_max_tokens(self) -> int | None:
        """Return the most tokens of an answer, where the request names them."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


async def prepare(context: Context, body: ChatBody) -> tuple[PreparedChat, list[Request]]:
    """Return a prepared conversation and its engine requests."""
    text = await context.render(body)
    chat = await aside(lambda: context.preprocessor.prepare(body, text), len(text))
    grammar = None if chat.constraint is None else await context.grammars.compile(*chat.constraint)
    chat = chat.constrained(grammar)
    return chat, engine_requests(context, body, [chat.prompt], [chat.params])


async def prompt_ids(context: Context, body: ChatBody) -> list[int]:
    """Return the tokens of a conversation's prompt. Raises ClientError."""
    text = await context.render(body)
    return await aside(lambda: context.preprocessor.encode(body, text), len(text))


async def count_common(context: Context, body: ChatBody, chat: PreparedChat) -> int:
    """Return how many tokens a prompt shares with another conversation; 0 on errors."""
    try:
        rendered = await context.render(body)
        common = await aside(lambda: chat.text[: num_common(rendered, chat.text)])
        [ids] = await context.encode([common], "messages", add_special_tokens=body.add_special_tokens)
    except (ClientError, ApiError):
        return 0
    return num_common(ids, chat.prompt)
