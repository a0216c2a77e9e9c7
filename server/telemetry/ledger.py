"""The book of generating requests: all that are open, and the last RECENT that ended, of batches' lines as many besides.

No prompt and no answer is in it.

Event loop. Found by the `x-request-id` of the answer's headers, or by the answer's own id, both names inside the owner's
account; of two requests that an owner gave the same id the later one is found. GET /v1/requests/{id} reads it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.core.snapshot import SequenceView
from engine.core.types import Request
from server.generation import Generation
from server.openai.usage import AnswerMetrics
from server.telemetry.queue_status import Place
from server.tenancy.tenancy import Account
from server.tenancy.tenant_file import DEFAULT

RECENT = 1000  # about a kilobyte each
_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_", "score-")
_ORDER = ("running", "prefill", "preempted")  # the state of a request is that of its foremost sequence


@dataclass(eq=False, slots=True, kw_only=True)
class Entry:
    """One request; mutable while it is open."""

    request_id: str
    answer_id: str
    endpoint: str
    stream: bool
    requests: Sequence[Request]  # emptied at the end: they hold the prompts
    adapter: str | None
    generation: Generation | None
    ledger: Ledger
    account: Account | None = None
    is_background: bool = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    end: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.is_background = self.requests[0].is_background
        self.ledger.open(self)

    @property
    def owner(self) -> str:
        return DEFAULT if self.account is None else self.account.tenant.name

    @property
    def names(self) -> tuple[tuple[str, str], ...]:
        """Under which it is found: its owner, and either id."""
        return (self.owner, self.request_id), (self.owner, self.answer_id)

    @property
    def engine_ids(self) -> list[str]:
        return [request.request_id for request in self.requests]

    @property
    def log_fields(self) -> dict[str, int | float | str]:
        """For the log line."""
        named: dict[str, int | float | str] = {} if self.account is None else {"tenant": self.account.tenant.name}
        return {} if self.generation is None else named | self.generation.history

    def close(self, status: int, seconds: float) -> None:
        """The answer is over, whichever way."""
        if self.generation is None:
            return
        self.end = {"state": "finished", **self._counts(), "status": status or None, "seconds": round(seconds, 3)}
        if self.account is not None:
            generation = self.generation
            self.account.close(generation.usage, generation.num_drawn_tokens, generation.timeline.spans())
        self.end["history"] = [*self._history(), {"event": "finished", "at_s": round(seconds, 3)}]
        self.generation, self.requests = None, ()
        self.ledger.close(self)

    def document(self, views: Sequence[SequenceView], place: Place | None) -> dict[str, Any]:
        """What is told of it; `views` and `place` are how it stands in the engine, while it is open."""
        head = {
            "id": self.request_id,
            "object": "request",
            "answer_id": self.answer_id,
            "endpoint": self.endpoint,
            "adapter": self.adapter,
            "stream": self.stream,
            "tenant": None if self.account is None else self.account.tenant.name,
            "created": self.created,
        }
        if self.generation is None:
            return head | self.end
        states = [view.status.value for view in views]
        state = next((name for name in _ORDER if name in states), "waiting" if place or not states else states[0])
        return head | {
            "state": state,
            "queue": None if place is None else place._asdict(),
            **self._counts(),
            "sequences": [self._sequence(view) for view in views],
            "history": self._history(),
        }

    def _sequence(self, view: SequenceView) -> dict[str, Any]:
        prompt = self.engine_ids.index(view.request_id)
        return {
            "choice": prompt * self.requests[prompt].params.n + view.choice,
            "state": view.status.value,
            "tokens": view.num_tokens,
            "computed_tokens": view.num_computed,
            "cached_tokens": view.num_cached,
            "blocks": len(view.blocks),
            "preemptions": view.num_preemptions,
        }

    def _counts(self) -> dict[str, Any]:
        assert self.generation is not None
        spans, cached = self.generation.timeline.spans(), self.generation.num_cached_tokens
        reasons = self.generation.timeline.finish_reasons
        return {
            "finish_reasons": [None if reason is None else reason.value for reason in reasons],
            "usage": self.generation.usage.model_dump(),
            "metrics": None
            if spans is None or self.generation.timeline.is_dropped
            else AnswerMetrics.of(spans, cached).model_dump(),
        }

    def _history(self) -> list[dict[str, Any]]:
        """Seconds since arrival; of several choices the slowest."""
        assert self.generation is not None
        events, at_s = [("received", 0.0)], 0.0
        spans = self.generation.timeline.spans()
        if spans is not None:
            for name, seconds in (
                ("scheduled", spans.queue_s),
                ("first_token", spans.prefill_s),
                ("last_token", spans.decode_s),
            ):
                at_s += seconds
                events.append((name, at_s))
        if not self.generation.usage.completion_tokens:
            events = events[:2]  # nothing was drawn, so far
        if self.generation.timeline.is_dropped:
            events[1:] = [("dropped", at) for _, at in events[1:2]]
        return [{"event": name, "at_s": round(at, 3)} for name, at in events]


class Ledger:
    """Opens, closes and finds entries. Where too many have ended, the owner that has most of them loses its oldest."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], Entry] = {}  # by owner and each of their names
        # Of clients that waited, and of the background, by owner.
        self._ended: tuple[dict[str, deque[Entry]], dict[str, deque[Entry]]] = {}, {}

    def open(self, entry: Entry) -> None:
        """From now on it can be found."""
        self._entries.update(dict.fromkeys(entry.names, entry))

    def close(self, entry: Entry) -> None:
        """It has ended: the oldest that ended is forgotten for it, if there are many."""
        ended = self._ended[entry.is_background]
        ended.setdefault(entry.owner, deque()).append(entry)
        if sum(map(len, ended.values())) <= RECENT:
            return
        oldest = max(ended.values(), key=len).popleft()
        for name in oldest.names:
            if self._entries.get(name) is oldest:
                del self._entries[name]

    def find(self, owner: str, name: str) -> Entry | None:
        """By the request's id, or the answer's with or without its prefix, among the owner's."""
        bare = next((name[len(prefix) :] for prefix in _PREFIXES if name.startswith(prefix)), name)
        return self._entries.get((owner, name)) or self._entries.get((owner, bare))
