"""The events of telemetry, the record of a generating request that they carry, and the sink that passes them on.

A record has no prompt and no answer. Routes, middleware and the tenants' accounts emit events, never one per token. Event loop, unless an event says otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.core.errors import QuireError
from engine.core.types import AbortCause, FinishReason, PromptInfo, Request
from engine.text.chat.history import ChatTurn
from server.protocol.documents import Usage
from server.telemetry.prefix_ends import PrefixEnd, prefix_end
from server.telemetry.timeline import Spans, Timeline
from server.tenancy.tenancy import Account
from server.tenancy.tenant_file import DEFAULT

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from server.protocol.errors import ApiError


TAG_CHARS = 8  # of a request's id: enough for a client to recognise its request, too few to use another's
_BEGUN_OR_LEFT = (0, 200, 499)  # statuses of an answer that began, or whose client left before it did


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
    prefix: PrefixEnd | None  # of a chat whose prompt was computed


class Generating(Protocol):
    """An open answer, as far as its record reads it; answers/generation.py has one."""

    timeline: Timeline

    @property
    def usage(self) -> Usage: ...

    @property
    def num_cached_tokens(self) -> int: ...

    @property
    def num_drawn_tokens(self) -> int: ...  # what a tenant is charged for

    @property
    def prompt_info(self) -> PromptInfo | None: ...  # of the first prompt


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
    turn: ChatTurn | None = None  # of a chat; likewise
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
        spans, finish_reasons, _, usage, num_cached, *_ = self.outcome
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
        info, turn = self.generation.prompt_info, self.turn
        prefix = None if info is None or turn is None else prefix_end(turn, info, self.requests[0].params)
        return Outcome(timeline.spans(), timeline.finish_reasons, timeline.is_dropped, usage, cached, error, prefix)

    def close(self, status: int, seconds: float) -> None:
        """Keep the state of the answer, and drop the prompts. Idempotent."""
        if self.generation is None:
            return
        self.end = self.outcome, status, seconds
        if self.account is not None:
            self.account.charge(self.generation.num_drawn_tokens)
        self.generation, self.turn, self.requests = None, None, ()


class RequestOpened(NamedTuple):
    """A generating request was submitted to the engine."""

    record: RequestRecord


class RequestEnded(NamedTuple):
    """A request's answer has ended: sent, failed or abandoned by its client."""

    record: RequestRecord  # still with its generation
    status: int
    seconds: float
    is_batch: bool = False  # a line of a batch


class HttpAnswered(NamedTuple):
    """An HTTP request was answered. Emitted before RequestEnded."""

    request_id: str
    route: str  # the route's template, never a raw path
    method: str
    status: int
    seconds: float
    record: RequestRecord | None  # of a generating request
    span: Span | None = None  # if it is traced
    caller: Caller | None = None
    error: ApiError | None = None  # which was the answer
    ignored_fields: Sequence[str] = ()

    @property
    def is_notable(self) -> bool:
        """Return whether it is logged and listed: polls that succeed are too frequent."""
        return self.method == "POST" or self.status >= 400


class TenantRefused(NamedTuple):
    """A request exceeded a limit of --tenants."""

    tenant: str
    limit: str


class FieldIgnored(NamedTuple):
    """A request field was let through without effect."""

    name: str


class PrefillDelegated(NamedTuple):
    """The decode daemon asked the prefill daemon for a prompt."""

    outcome: str


# The headers that a request of ours carries so that its receiver continues the trace; none without traces. Set for the task
# of an HTTP request, and for the tasks that it starts.
TRACE_HEADERS: ContextVar[Mapping[str, str]] = ContextVar("trace_headers", default={})  # noqa: B039 - never changed

Event = RequestOpened | RequestEnded | HttpAnswered | TenantRefused | FieldIgnored | PrefillDelegated
Listener = Callable[[Event], None]


class Telemetry:
    """Passes events to listeners, in order."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = listeners

    def emit(self, event: Event) -> None:
        """Pass an event to every listener. Any thread, where the event says so."""
        for listen in self._listeners:
            listen(event)
