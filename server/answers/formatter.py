"""Formatters: an answer becomes one JSON document, or a stream of events."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol

from pydantic_core import to_json

from engine.system.version import VERSION
from engine.text.chat.choice import Delta
from engine.text.tokenizer import PromptLogprobs, TextTokenizer, prompt_logprobs
from engine.text.types import Content
from server.answers.body import SamplingBody, StreamOptions
from server.protocol.documents import ResponseBody, Usage
from server.protocol.errors import ApiError
from server.telemetry.answer_metrics import AnswerMetrics, with_metrics

_NO_OPTIONS = StreamOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkMeta:
    """The fields that all chunks of an answer share, and what formatting needs."""

    id_prefix: str
    model: str
    tokenizer: TextTokenizer
    prompts: Sequence[Sequence[int]]
    answer_id: str
    has_usage: bool = False  # every stream ends with its usage
    has_token_ids: bool = False  # logprobs spell tokens as their ids
    call_id_length: int = 0  # of a tool call, where the model's template insists on one
    created: int = field(default_factory=lambda: int(time.time()))

    def fields(self, object_name: str) -> dict[str, Any]:
        """Return the shared fields of a document."""
        return {
            "id": f"{self.id_prefix}-{self.answer_id}",
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"quire-{VERSION}",
        }


class ResponseFormatter(Protocol):
    """Formats deltas for the clients of one API. One object an answer."""

    @abstractmethod
    def answer(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        """Return the whole answer as a JSON document, of one delta a choice."""

    def opening(self) -> bytes:
        """Return the first frames of a stream, before anything is known, or b""."""
        return b""

    def news(self, news: Sequence[tuple[int, Delta]], usage: Callable[[], Usage]) -> bytes:
        """Return the frames of new deltas. `usage` returns the counts so far."""

    def closing(self, usage: Usage, metrics: AnswerMetrics | None) -> bytes:
        """Return the last frames; `metrics` are given if the client wants them."""

    def failure(self, error: ApiError) -> bytes:
        """Return the last frame of a stream that failed."""


class ChunkFormatter(ResponseFormatter):
    """Formats a stream as unnamed events, a chunk each, and an end mark.

    A chunk's JSON around its choices is written once an answer, and around a text alone once a choice: a token then costs its
    text alone.
    """

    chunk: ClassVar[type[ResponseBody]]  # its last field is `choices`
    object_name: ClassVar[str]  # of a chunk

    def __init__(self, body: SamplingBody, meta: ChunkMeta) -> None:
        self._body = body
        self._meta = meta
        options = body.stream_options or _NO_OPTIONS
        self._has_usage = options.include_usage or meta.has_usage
        self._counts_often = options.continuous_usage_stats
        self._spells_ids = body.return_tokens_as_token_ids or meta.has_token_ids
        self._varies = self._counts_often or body.return_token_ids  # around a text
        self._around: dict[int, tuple[bytes, bytes]] = {}  # the frame of a text, by choice

    @cached_property
    def _chunk_fields(self) -> dict[str, Any]:
        return self._meta.fields(self.object_name)

    @cached_property
    def _head(self) -> bytes:
        """Return a chunk's JSON up to its choices; made with the first chunk, once the engine has the request."""
        document = self.chunk(**self._chunk_fields, choices=[]).json_bytes()
        assert document.endswith(b'"choices":[]}')
        return document[:-2]

    @abstractmethod
    def chunks(self, index: int, delta: Delta, **usage: Usage | None) -> list[bytes]:
        """Return the chunks of a delta. `usage` is given if the client wants it."""

    def news(self, news: Sequence[tuple[int, Delta]], usage: Callable[[], Usage]) -> bytes:
        frames: list[bytes] = []
        for index, delta in news:
            if self._varies or (text := delta.text_alone) is None:
                shown = self._shown(usage() if self._counts_often else None)
                frames += [frame(chunk) for chunk in self.chunks(index, delta, **shown)]
                continue
            around = self._around.get(index)
            if around is None:
                (chunk,) = self.chunks(index, Delta([Content("\0")]), **self._shown(None))
                before, _, after = frame(chunk).rpartition(to_json("\0"))
                around = self._around[index] = before, after
            frames += (around[0], to_json(text), around[1])
        return b"".join(frames)

    def _shown(self, usage: Usage | None) -> dict[str, Usage | None]:
        """Return the counts so far, if the client wants them."""
        return {"usage": usage} if self._has_usage else {}

    def closing(self, usage: Usage, metrics: AnswerMetrics | None) -> bytes:
        last = self._render(b"", usage=usage)
        if metrics is not None:
            return frame(with_metrics(last, metrics)) + DONE
        return frame(last) + DONE if self._has_usage else DONE

    def failure(self, error: ApiError) -> bytes:
        return frame(error.body()) + DONE

    def _render(self, choices: bytes, **usage: Usage | None) -> bytes:
        """Return a whole chunk. `usage` is given, perhaps None, if the client wants it."""
        if not usage:
            return self._head + choices + b"]}"
        counts = usage["usage"]
        return b'%s%s],"usage":%s}' % (self._head, choices, b"null" if counts is None else counts.json_bytes())

    def _prompt_logprobs(self, delta: Delta) -> PromptLogprobs | None:
        """Return the prompt's log probabilities, if the request asked for them."""
        if self._body.prompt_logprobs is None or delta.prompt is None or delta.prompt.logprobs is None:
            return None
        return prompt_logprobs(self._meta.tokenizer, delta.prompt.logprobs, self._body.prompt_logprobs)


DONE = b"data: [DONE]\n\n"  # the end mark of OpenAI's older APIs


def frame(document: bytes, event: str = "") -> bytes:
    """Return one event. JSON has no raw line breaks, so it is one data line."""
    data = b"data: " + document + b"\n\n"
    return b"event: " + event.encode() + b"\n" + data if event else data
