"""Records generating requests: all open ones, and the last RECENT ended ones.

Batch lines have a separate bound of the same size. A record has no prompt and no answer. GET /v1/requests/{id} finds it by
the answer's id or by the `x-request-id` of its headers, within the owner's account; if an owner used an id twice, the later
request is found. Event loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.core.errors import QuireError
from engine.core.types import AbortCause, FinishReason, Request
from server.protocol.documents import Usage
from server.telemetry.timeline import Spans, Timeline
from server.tenancy.tenancy import Account
from server.tenancy.tenant_file import DEFAULT

RECENT = 1000  # about a kilobyte each
_BEGUN_OR_LEFT = (0, 200, 499)  # statuses of an answer that began, or whose client left before it did
_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_", "score-")


class Caller(NamedTuple):
    """The sender of an HTTP request, and its target."""

    path: str  # as the agent, cut and without control characters
    address: str
    agent: str  # the User-Agent
    tenant: str | None  # None where no account of --tenants is known
    begun_s: float  # Unix time


class Outcome(NamedTuple):
    """The state of a request's answer, now or at its end."""

    spans: Spans | None
    finish_reasons: list[FinishReason | None]
    is_dropped: bool
    usage: Usage
    num_cached_tokens: int
    error: QuireError | None  # of the first choice that failed


class Generating(Protocol):
    """An open answer, as far as its record reads it; answers/generation.py has one."""

    timeline: Timeline

    @property
    def usage(self) -> Usage: ...

    @property
    def num_cached_tokens(self) -> int: ...

    @property
    def num_drawn_tokens(self) -> int: ...  # what a tenant is charged for


@dataclass(eq=False, slots=True, kw_only=True)
class RequestRecord:
    """One generating request; mutable while it is open."""

    request_id: str
    answer_id: str
    endpoint: str
    stream: bool
    requests: Sequence[Request]  # emptied at the end: they hold the prompts
    adapter: str | None
    generation: Generating | None  # None once it has ended
    account: Account | None = None
    caller: Caller | None = None  # None of a batch line
    ignored_fields: Sequence[str] = ()
    is_background: bool = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    end: tuple[Outcome, int, float] | None = None  # with the status and the seconds

    def __post_init__(self) -> None:
        self.is_background = self.requests[0].is_background

    @property
    def owner(self) -> str:
        return DEFAULT if self.account is None else self.account.tenant.name

    @property
    def names(self) -> tuple[tuple[str, str], ...]:
        """Return the keys that it is found by: its owner, and either id."""
        return (self.owner, self.request_id), (self.owner, self.answer_id)

    @property
    def engine_ids(self) -> list[str]:
        return [request.request_id for request in self.requests]

    def log_fields(self, status: int) -> dict[str, int | float | str]:
        """Return the log line's fields: counts, and the seconds of the slowest choice."""
        if self.generation is None:
            return {}
        spans, finish_reasons, _, usage, num_cached, _ = self.outcome
        fields: dict[str, int | float | str] = {} if self.account is None else {"tenant": self.account.tenant.name}
        fields["prompt_tokens"] = usage.prompt_tokens
        fields["cached_tokens"] = num_cached
        fields["completion_tokens"] = usage.completion_tokens
        reasons = {reason.value for reason in finish_reasons if reason is not None}
        has_failed = reasons - {FinishReason.STOP.value, FinishReason.LENGTH.value}
        if None in finish_reasons and status in _BEGUN_OR_LEFT and not has_failed:
            reasons.add(AbortCause.DISCONNECT.value)
        if reasons:  # a stream's status is 200 even if it fails or its client leaves
            fields["finish_reason"] = "+".join(sorted(reasons))
        if spans is not None:
            fields["queue_s"] = round(spans.queue_s, 3)
            fields["prefill_s"] = round(spans.prefill_s, 3)
            fields["decode_s"] = round(spans.decode_s, 3)
            if spans.num_preemptions is not None:
                fields["preemptions"] = spans.num_preemptions
        return fields

    @property
    def outcome(self) -> Outcome:
        """Return the state of the answer."""
        if self.end is not None:
            return self.end[0]
        assert self.generation is not None
        timeline, usage = self.generation.timeline, self.generation.usage
        cached = self.generation.num_cached_tokens
        error = next((choice.error for choice in timeline.choices if choice.error is not None), None)
        return Outcome(timeline.spans(), timeline.finish_reasons, timeline.is_dropped, usage, cached, error)

    def close(self, status: int, seconds: float) -> None:
        """Keep the state of the answer, and drop the prompts. Idempotent."""
        if self.generation is None:
            return
        self.end = self.outcome, status, seconds
        if self.account is not None:
            self.account.charge(self.generation.num_drawn_tokens)
        self.generation, self.requests = None, ()


class RequestLog:
    """Opens, closes and finds records; the owner with most loses its oldest."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], RequestRecord] = {}  # by owner and each of their names
        # By owner: of clients, and of the background.
        self._ended: tuple[dict[str, deque[RequestRecord]], dict[str, deque[RequestRecord]]] = {}, {}

    def open(self, record: RequestRecord) -> None:
        """Add a record, so that it can be found."""
        self._records.update(dict.fromkeys(record.names, record))

    def close(self, record: RequestRecord, status: int, seconds: float) -> None:
        """Close a record; beyond RECENT, forget the oldest that ended."""
        if record.generation is None:
            return
        record.close(status, seconds)
        ended = self._ended[record.is_background]
        ended.setdefault(record.owner, deque()).append(record)
        if sum(map(len, ended.values())) <= RECENT:
            return
        oldest = max(ended.values(), key=len).popleft()
        for name in oldest.names:
            if self._records.get(name) is oldest:
                del self._records[name]

    def find(self, owner: str, name: str) -> RequestRecord | None:
        """Return an owner's record by the request's id, or by the answer's."""
        bare = next((name[len(prefix) :] for prefix in _PREFIXES if name.startswith(prefix)), name)
        return self._records.get((owner, name)) or self._records.get((owner, bare))

    def open_ids(self) -> dict[str, str]:
        """Return the `x-request-id` of each open request by its ids in the engine."""
        opened = (record for record in self._records.values() if record.end is None)
        return {engine_id: record.request_id for record in opened for engine_id in record.engine_ids}
