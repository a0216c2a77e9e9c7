"""How an answer leaves: whole, or as a stream of events; and what the two APIs with chunks of choices have in common."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
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
    """What is the same in every chunk of an answer, and what shaping its choices takes."""

    id_prefix: str
    model: str
    tokenizer: Tokenizer
    prompts: Sequence[Sequence[int]]
    answer_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def fields(self, object_name: str) -> dict[str, Any]:
        """As JSON names them."""
        return {
            "id": f"{self.id_prefix}-{self.answer_id}",
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"quire-{VERSION}",
        }


class ChunkTemplate:
    """A chunk's JSON around its choice, made once an answer: a token then costs its choice alone, a third of the whole."""

    __slots__ = ("_head",)

    def __init__(self, empty: ResponseBody) -> None:
        """`empty` is a chunk whose last field is `choices`, without any."""
        document = empty.json_bytes()
        assert document.endswith(b'"choices":[]}')
        self._head = document[:-2]

    def render(self, choice: ResponseBody, **usage: Usage | None) -> bytes:
        """A whole chunk. `usage` is given, perhaps as None, where the client asked for it."""
        return self.render_all([choice], **usage)

    def render_all(self, choices: Iterable[ResponseBody], **usage: Usage | None) -> bytes:
        """The same with several choices, each written by itself: a thousand in one call would hold the GIL for long."""
        tail = b"]}"
        for value in usage.values():
            tail = b'],"usage":%s}' % (b"null" if value is None else value.json_bytes())
        return self._head + b",".join([choice.json_bytes() for choice in choices]) + tail


class ResponseFormatter(Protocol):
    """Shapes deltas as what a client of one API reads. One object an answer."""

    def answer(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        """The whole answer as one JSON document, one delta a choice."""
        ...

    def opening(self) -> bytes:
        """What a stream begins with, while nothing is known yet; perhaps nothing."""
        ...

    def news(self, news: Sequence[tuple[int, Delta]], usage: Callable[[], Usage]) -> bytes:
        """Frames for what is new in some choices. `usage` counts so far."""
        ...

    def closing(self, usage: Usage, metrics: AnswerMetrics | None) -> bytes:
        """What a stream ends with; `metrics` are given where the client asked for them."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """What a stream ends with if something went wrong."""
        ...


class ChunkFormatter(Protocol):
    """Shapes deltas as JSON documents with choices. One object an answer."""

    def answer(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        """The whole answer, one delta a choice."""
        ...

    def chunks(self, index: int, delta: Delta, **usage: Usage | None) -> list[bytes]:
        """What is new in one choice. `usage` is given, perhaps as None, where the client asked for it."""
        ...

    def closing(self, usage: Usage) -> bytes:
        """The last chunk of a stream that reports usage."""
        ...


class Chunks:
    """Implements ResponseFormatter: a stream of nameless events, a chunk each, with an end mark."""

    def __init__(self, formatter: ChunkFormatter, options: StreamOptions) -> None:
        self._formatter = formatter
        self._options = options

    def answer(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        return self._formatter.answer(deltas, usage)

    def opening(self) -> bytes:
        return b""

    def news(self, news: Sequence[tuple[int, Delta]], usage: Callable[[], Usage]) -> bytes:
        told: dict[str, Usage | None] = {}
        if self._options.include_usage:
            told = {"usage": usage() if self._options.continuous_usage_stats else None}
        return b"".join(
            [frame(chunk) for index, delta in news for chunk in self._formatter.chunks(index, delta, **told)]
        )

    def closing(self, usage: Usage, metrics: AnswerMetrics | None) -> bytes:
        if metrics is not None:
            return frame(with_metrics(self._formatter.closing(usage), metrics)) + DONE
        return frame(self._formatter.closing(usage)) + DONE if self._options.include_usage else DONE

    def failure(self, error: ApiError) -> bytes:
        return frame(error.body()) + DONE


DONE = b"data: [DONE]\n\n"  # what OpenAI's older streams end with


def frame(document: bytes, event: str = "") -> bytes:
    """One event, named or not. JSON has no raw line breaks, so one data line carries it."""
    data = b"data: " + document + b"\n\n"
    return b"event: " + event.encode() + b"\n" + data if event else data
