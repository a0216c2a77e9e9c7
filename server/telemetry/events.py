"""The events of telemetry, the record of a generating request that they carry, its times, and the sink that passes them on.

A record has no prompt and no answer. Routes, middleware and the tenants' accounts emit events, never one per token. Event
loop, unless an event says otherwise.

A timeline has how long each part of an answer took, per choice and in sum. The engine reports waiting and prefill with a choice's first token, the rest with its end. A choice that a stop
string ended is over for the client before the engine reports it; until then its decoding is timed by the events' arrival.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.core.errors import QuireError
from engine.core.types import AbortCause, FinishReason, PromptInfo, Request, TokenEvent
from engine.text.chat.history import ChatTurn
from server.protocol.documents import Usage
from server.telemetry.prefix_ends import PrefixEnd, prefix_end
from server.tenancy.tenancy import DEFAULT, Account

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from server.protocol.errors import ApiError


class Spans(NamedTuple):
    """An answer's seconds, of its slowest choice in each part, and its pace."""

    queue_s: float  # arrival until first scheduled
    prefill_s: float  # first scheduled until first token
    decode_s: float  # first token until last
    num_preemptions: int | None  # None until the engine has reported every choice
    mean_itl_s: float | None  # between two tokens of a choice; None where no choice has two
    tokens_per_s: float | None  # of all choices together while they were decoded
    num_drafted: int  # tokens, by speculation, of the choices that have ended ...
    num_accepted: int  # ... and those of them that were accepted


@dataclass(slots=True)
class ChoiceTimes:
    """What is known of a choice so far."""

    num_tokens: int = 0
    queue_s: float | None = None  # unknown while it waits
    prefill_s: float = 0.0
    decode_s: float = 0.0
    first_heard_s: float | None = None
    num_preemptions: int | None = None  # known at its end
    preempted_s: tuple[float, ...] = ()  # engine's clock; known at its end
    error: QuireError | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    finish_reason: FinishReason | None = None

    @property
    def is_completed(self) -> bool:
        """Return whether it ended by a stop or by its length."""
        return self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


class Timeline:
    """Takes every event of an answer, in order, by choice of all prompts."""

    def __init__(self, num_choices: int) -> None:
        self.choices = [ChoiceTimes() for _ in range(num_choices)]

    @property
    def is_complete(self) -> bool:
        """Return whether the engine has ended every choice."""
        return all(choice.num_preemptions is not None for choice in self.choices)

    @property
    def finish_reasons(self) -> list[FinishReason | None]:
        """Return one per choice; None while it is open."""
        return [choice.finish_reason for choice in self.choices]

    @property
    def is_dropped(self) -> bool:
        """Return whether a choice was dropped as hopeless, and no other has begun."""
        return FinishReason.DROPPED in self.finish_reasons and not self._begun()

    def hear(self, index: int, event: TokenEvent) -> None:
        """Take an event of a choice. Tokens after a stop string are not counted."""
        choice, timings = self.choices[index], event.timings
        if event.prompt is not None:
            choice.queue_s, choice.prefill_s = event.prompt.queue_s, event.prompt.prefill_s
        if event.token_ids and choice.finish_reason is None:
            choice.num_tokens += len(event.token_ids)
            now = time.monotonic()
            choice.first_heard_s = now if choice.first_heard_s is None else choice.first_heard_s
            choice.decode_s = now - choice.first_heard_s
        if event.finish_reason is None:
            return
        choice.num_preemptions, choice.error = 0, None if event.error is None else event.error.exception()
        if timings is not None:
            choice.num_preemptions, choice.preempted_s = timings.num_preemptions, timings.preempted_s
            choice.num_drafted, choice.num_accepted = timings.num_drafted, timings.num_accepted
        if choice.finish_reason is not None:
            return  # ended by a stop string; later tokens are not shown
        choice.finish_reason = event.finish_reason
        if timings is not None:
            choice.queue_s, choice.prefill_s, choice.decode_s = timings.queue_s, timings.prefill_s, timings.decode_s

    def stop(self, index: int, reason: FinishReason = FinishReason.STOP) -> None:
        """Note that a stop string ended this choice, or a guard."""
        self.choices[index].finish_reason = reason

    def spans(self) -> Spans | None:
        """Return the times of all choices so far; None while all of them wait."""
        choices = self.choices
        if self._begun():  # the waiting time of dropped ones does not count
            choices = [choice for choice in choices if choice.finish_reason is not FinishReason.DROPPED]
        waits = [choice.queue_s for choice in choices if choice.queue_s is not None]
        if not waits:
            return None
        decode_s = max(choice.decode_s for choice in choices)
        paces = [choice.decode_s / (choice.num_tokens - 1) for choice in choices if choice.num_tokens > 1]
        preemptions = [choice.num_preemptions for choice in choices if choice.num_preemptions is not None]
        num_later = sum(max(choice.num_tokens - 1, 0) for choice in choices)  # the first token of each is the prefill's
        return Spans(
            queue_s=max(waits),
            prefill_s=max(choice.prefill_s for choice in choices),
            decode_s=decode_s,
            num_preemptions=sum(preemptions) if len(preemptions) == len(choices) else None,
            mean_itl_s=sum(paces) / len(paces) if paces else None,
            tokens_per_s=num_later / decode_s if decode_s > 0 else None,
            num_drafted=sum(choice.num_drafted for choice in choices),
            num_accepted=sum(choice.num_accepted for choice in choices),
        )

    def _begun(self) -> bool:
        """Return whether a choice that was not dropped has begun."""
        dropped = FinishReason.DROPPED
        return any(choice.queue_s is not None and choice.finish_reason is not dropped for choice in self.choices)


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
    model: str  # its first name
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
        has_failed = reasons - {FinishReason.STOP.value, FinishReason.LENGTH.value, FinishReason.CONTENT_FILTER.value}
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
    """A prompt came to a decode daemon with the place of its K/V."""

    outcome: str


Event = RequestOpened | RequestEnded | HttpAnswered | TenantRefused | FieldIgnored | PrefillDelegated
Listener = Callable[[Event], None]


def fan_out(*listeners: Listener) -> Listener:
    """Return what passes an event to every listener, in order. Any thread, where the event says so."""

    def emit(event: Event) -> None:
        for listen in listeners:
            listen(event)

    return emit
