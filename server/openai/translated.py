"""Requests of other APIs that become a ChatBody, and are answered as one.

A field that chat has too, and that the other API does not spell otherwise, is passed on unchanged. Pure data, no HTTP.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import Field, ValidationError

from engine.core.errors import ClientError
from engine.text.chat.choice import Delta
from engine.text.fields.body import IdleFields, Refused, RequestBody
from engine.text.types import CallArguments, CallBegin, Piece
from server.answers.body import HINTS, NO_OPS, UNSUPPORTED, ChatBody, SamplingBody
from server.protocol.errors import ApiError, to_api_error

# Fields that these APIs spell otherwise, or for whose result their answers have no place.
_CHATS_OWN = {"early_stopping", "length_penalty", "max_tokens", "n", "prompt_logprobs", "response_format"}
_CHATS_OWN |= {
    "include_metrics",
    "kv_transfer_params",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "stream_options",
    "use_beam_search",
}

_SEARCHES = "beam searches are what /v1/chat/completions makes; ask there"

Event = TypeVar("Event")


class TranslatedBody(RequestBody):
    """The fields that the translated requests share."""

    NO_OPS: ClassVar[frozenset[str]] = NO_OPS
    HINTS: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **HINTS,
        "early_stopping": (False,),
        "kv_transfer_params": ({},),
        "length_penalty": (1, 1.0),
        "thinking_token_budget": (),
        "mm_processor_kwargs": ({},),
    }
    UNSUPPORTED: ClassVar[Mapping[str, Refused]] = {
        **UNSUPPORTED,
        "beam_width": Refused(UNSUPPORTED["beam_width"].neutral, _SEARCHES),
        "use_beam_search": Refused((False,), _SEARCHES),
    }
    IDLE: ClassVar[IdleFields] = {
        "priority": lambda body, limits: bool(body.model_extra["priority"]) and not limits.has_priorities,
        "guided_whitespace_pattern": lambda body, _: body.model_extra.get("guided_json") is None,
    }
    # chat's field -> this API's field that it is made of, which errors name
    OWN_NAMES: ClassVar[Mapping[str, str]] = {}
    # chat's field -> the attribute that it is as it stands, in requests that are answered
    ANSWERED: ClassVar[Mapping[str, str]] = {}

    model: str | None = Field(None, description="The served model or adapter; absent means the model of the daemon.")
    temperature: float | None = Field(
        None, ge=0, le=2, description="Divides the logits; 0 takes the most probable token."
    )
    top_p: float | None = Field(
        None, gt=0, le=1, description="Draw from the smallest set of tokens with this total probability."
    )
    stream: bool = Field(False, description="Send the answer as server-sent events while it is generated.")

    def ignored_fields(self) -> list[str]:
        """Return the ignored fields that chat does not have either."""
        return [name for name in super().ignored_fields() if name not in PASSED_ON]

    def chat_body(self, fields: Mapping[str, Any]) -> ChatBody:
        """Return a chat of these fields, without null ones, and of the shared ones."""
        shared = {name: getattr(self, name) for name in ("model", "temperature", "top_p", "stream")}
        passed = {name: value for name, value in (self.model_extra or {}).items() if name in PASSED_ON}
        own = {name: getattr(self, attribute) for name, attribute in self.ANSWERED.items()}
        given = {name: value for name, value in {**fields, **own}.items() if value not in (None, [])}
        return ChatBody.model_validate({**passed, **shared, **given})

    @classmethod
    @contextmanager
    def own_names(cls) -> Iterator[None]:
        """Rename chat's fields to this API's in an error of the chat."""
        try:
            yield
        except (ApiError, ClientError, ValidationError) as error:
            api_error = to_api_error(error)
            param = api_error.param or ""
            is_about = [f"{param}.".startswith(f"{chats}.") for chats in cls.OWN_NAMES]
            for (chats, own), is_it in zip(cls.OWN_NAMES.items(), is_about, strict=True):
                if is_it or "_" in chats:  # a plain word may not be a field's name
                    api_error.message = re.sub(rf"(?<![\w.]){re.escape(chats)}(?!\w)", own, api_error.message)
                if is_it and api_error.param == param:
                    api_error.param = own + param[len(chats) :]
            raise api_error from error


# Fields of chat, beyond OpenAI's and Anthropic's, that mean the same here.
PASSED_ON = (
    (SamplingBody.model_fields.keys() | {"chat_template_kwargs"}) - TranslatedBody.model_fields.keys() - _CHATS_OWN
)


class PieceWriter(ABC, Generic[Event]):
    """Writes an answer as blocks, one for each run of text or reasoning and each call."""

    def __init__(self) -> None:
        self._open: type[Piece] | None = None  # the kind of piece that continues the open block
        self._texts: list[str] = []  # of the open block

    @abstractmethod
    def _begin(self, piece: Piece) -> list[Event]:
        """Open a block and return its events."""

    @abstractmethod
    def _grow(self, text: str) -> Event:
        """Return the event of more text in the open block."""

    @abstractmethod
    def _close(self, text: str) -> list[Event]:
        """Complete the open block with its whole text and return its events."""

    def _write(self, delta: Delta) -> list[Event]:
        events: list[Event] = []
        for piece in delta.pieces:
            if type(piece) is not self._open:
                events += self._end_block()
                events += self._begin_block(piece)
            if not isinstance(piece, CallBegin):
                self._texts.append(piece.text)
                events.append(self._grow(piece.text))
        return events

    def _begin_block(self, piece: Piece) -> list[Event]:
        self._open = CallArguments if isinstance(piece, CallBegin) else type(piece)
        return self._begin(piece)

    def _end_block(self) -> list[Event]:
        if self._open is None:
            return []
        text = "".join(self._texts)
        self._open, self._texts = None, []
        return self._close(text)
