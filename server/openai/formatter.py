"""Formatters: an answer becomes one JSON document, or a stream of events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.text.choice import Delta
from engine.text.types import Tokenizer
from engine.version import VERSION
from server.errors import ApiError
from server.http.bodies import ResponseBody
from server.openai.sampling import StreamOptions
from server.openai.usage import Usage
from server.telemetry.timeline import AnswerMetrics, with_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkMeta:
    """The fields that all chunks of an answer share, and what formatting needs."""

    id_prefix: str
    model: str
    tokenizer: Tokenizer
    prompts: Sequence[Sequence[int]]
    answer_id: str = field(default_factory=lambda: uuid.uuid4().hex)
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


class ChunkTemplate:
    """A chunk's JSON around its choices, written once an answer.

    A token then costs its choice alone, a third of the whole.
    """

    __slots__ = ("_head",)

    def __init__(self, empty: ResponseBody) -> None:
        """`empty` is a chunk without choices, whose last field is `choices`."""
        document = empty.json_bytes()
        assert document.endswith(b'"choices":[]}')
        self._head = document[:-2]

    def render(self, choice: ResponseBody, **usage: Usage | None) -> bytes:
        """Return a whole chunk. `usage` is given, perhaps None, if the client wants it."""
        return self._head + choice.json_bytes() + (_tail(usage) if usage else b"]}")

    def render_all(self, choices: Iterable[ResponseBody], **usage: Usage | None) -> bytes:
        """Return a chunk with several choices, each written alone.

        A thousand in one call would hold the GIL for long.
        """
        return self._head + b",".join([choice.json_bytes() for choice in choices]) + _tail(usage)


def _tail(usage: Mapping[str, Usage | None]) -> bytes:
    """Return what closes a chunk: the usage, if there is any, and the braces."""
    for value in usage.values():
        return b'],"usage":%s}' % (b"null" if value is None else value.json_bytes())
    return b"]}"


class ResponseFormatter(Protocol):
    """Formats deltas for the clients of one API. One object an answer."""

    def answer(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        """Return the whole answer as a JSON document, of one delta a choice."""
        ...

    def opening(self) -> bytes:
        """Return the first frames of a stream, before anything is known, or b""."""
        ...

    def news(self, news: Sequence[tuple[int, Delta]], usage: Callable[[], Usage]) -> bytes:
        """Return the frames of new deltas. `usage` returns the counts so far."""
        ...

    def closing(self, usage: Usage, metrics: AnswerMetrics | None) -> bytes:
        """Return the last frames; `metrics` are given if the client wants them."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """Return the last frame of a stream that failed."""
        ...


class ChunkFormatter(Protocol):
    """Formats deltas as JSON documents with choices. One object an answer."""

    def answer(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        """Return the whole answer, of one delta a choice."""
        ...

    def chunks(self, index: int, delta: Delta, **usage: Usage | None) -> list[bytes]:
        """Return the chunks of a delta. `usage` is given if the client wants it."""
        ...

    def closing(self, usage: Usage) -> bytes:
        """Return the last chunk of a stream that reports usage."""
        ...


class Chunks:
    """Implements ResponseFormatter: unnamed events, a chunk each, and an end mark."""

    def __init__(self, formatter: ChunkFormatter, options: StreamOptions) -> None:
        self._formatter = formatter
        self._options = options

    def answer(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        return self._formatter.answer(deltas, usage)

    def opening(self) -> bytes:
        return b""

    def news(self, news: Sequence[tuple[int, Delta]], usage: Callable[[], Usage]) -> bytes:
        shown: dict[str, Usage | None] = {}
        if self._options.include_usage:
            shown = {"usage": usage() if self._options.continuous_usage_stats else None}
        return b"".join(
            [frame(chunk) for index, delta in news for chunk in self._formatter.chunks(index, delta, **shown)]
        )

    def closing(self, usage: Usage, metrics: AnswerMetrics | None) -> bytes:
        if metrics is not None:
            return frame(with_metrics(self._formatter.closing(usage), metrics)) + DONE
        return frame(self._formatter.closing(usage)) + DONE if self._options.include_usage else DONE

    def failure(self, error: ApiError) -> bytes:
        return frame(error.body()) + DONE


DONE = b"data: [DONE]\n\n"  # the end mark of OpenAI's older APIs


def frame(document: bytes, event: str = "") -> bytes:
    """Return one event. JSON has no raw line breaks, so it is one data line."""
    data = b"data: " + document + b"\n\n"
    return b"event: " + event.encode() + b"\n" + data if event else data
