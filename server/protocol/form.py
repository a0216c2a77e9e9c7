"""What the two generating APIs have in common on the way out: an envelope around choices, plain or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from server.choice import Delta
from server.protocol.base import ResponseBody
from server.protocol.usage import Usage
from server.text import Tokenizer
from server.version import VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
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


class ChunkMould:
    """A chunk's JSON around its choice, made once an answer: a token then costs its choice alone, a third of the whole."""

    __slots__ = ("_head",)

    def __init__(self, empty: ResponseBody) -> None:
        """`empty` is a chunk whose last field is `choices`, without any."""
        document = empty.json_bytes()
        assert document.endswith(b'"choices":[]}')
        self._head = document[:-2]

    def cast(self, choice: ResponseBody, **usage: Usage | None) -> bytes:
        """A whole chunk. `usage` is given, perhaps as None, where the client asked for it."""
        tail = b"]}"
        for value in usage.values():
            tail = b'],"usage":%s}' % (b"null" if value is None else value.json_bytes())
        return self._head + choice.json_bytes() + tail


class Form(Protocol):
    """Shapes deltas as JSON documents. One object an answer."""

    def answer(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        """The whole answer, one delta a choice."""
        ...

    def chunks(self, index: int, delta: Delta, **usage: Usage | None) -> list[bytes]:
        """What is new in one choice. `usage` is given, perhaps as None, where the client asked for it."""
        ...

    def closing(self, usage: Usage) -> bytes:
        """The last chunk of a stream that reports usage."""
        ...
