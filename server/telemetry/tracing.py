"""Traces requests: one server span each, with the children queue, prefill and decode.

The server span begins and ends with the HTTP request; a line of a batch has a span without one. The children are made at
the end, from the times that the engine reported with the answer, on the engine's clock. No span contains text of a prompt
or of an answer. Event loop.

Names are those of OpenTelemetry's semantic conventions. For GenAI these have the status Development: names may change with
any version. They are of version 1.41.1, the last one that the versioned conventions published before GenAI moved to a
separate repository, which has made no stable release since. To move to another version, change this file, and the table in
docs/observe/traces.md. Names that begin with `quire.` are ours: the conventions have none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Final, NamedTuple

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, TracerProvider, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers
from starlette.types import Scope

from engine.core.errors import ShuttingDownError
from engine.core.types import FinishReason, Request, SamplingParams
from engine.system.version import VERSION
from server.protocol.errors import to_api_error
from server.telemetry.events import ChoiceTimes, Event, HttpAnswered, RequestEnded, RequestRecord

MAX_CHILDREN = 64  # spans of one request; one with a thousand choices would fill the queue
MAX_PATH = 256  # characters, of a route or not
_SCOPE = "quire"
_NS = 1_000_000_000

CONVENTIONS: Final = "1.41.1"
SCHEMA_URL: Final = f"https://opentelemetry.io/schemas/{CONVENTIONS}"


class Operation(NamedTuple):
    """What an endpoint does, and how the ids of its answers begin."""

    name: str
    id_prefix: str = ""


# "chat", "text_completion" and "embeddings" are the conventions' own; a custom value may be used where none applies.
OPERATIONS: Final = {
    "/v1/chat/completions": Operation("chat", "chatcmpl-"),
    "/v1/responses": Operation("chat", "resp_"),
    "/v1/messages": Operation("chat", "msg_"),
    "/v1/completions": Operation("text_completion", "cmpl-"),
    "/v1/embeddings": Operation("embeddings"),
    "/v1/score": Operation("score", "score-"),
    "/score": Operation("score", "score-"),
    **{f"{version}/rerank": Operation("rerank", "rerank-") for version in ("", "/v1", "/v2")},
    **{f"{version}/classify": Operation("classify", "classify-") for version in ("", "/v1")},
    "/pooling": Operation("embeddings", "pool-"),
}


Attributes = dict[str, AttributeValue]


class Outcome(NamedTuple):
    """How a request ended, as spans report it."""

    error_type: str | None  # of a failure of the server, never of the client
    is_abandoned: bool = False  # the client left before the end


class Tracing:
    """Begins spans, writes them into headers, and ends them as events say."""

    def __init__(self, tracers: TracerProvider, clock: Callable[[], float]) -> None:
        """`clock` is the engine's."""
        self._tracer: Tracer = tracers.get_tracer(_SCOPE, VERSION, SCHEMA_URL)
        self._clock = clock
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, scope: Scope, headers: Headers) -> Span | None:
        """Return the span of an HTTP request; None for probes and pages, which are frequent.

        An invalid `traceparent` is ignored, as is one that was sent twice.
        """
        method = scope["method"]
        if method != "POST":
            return None
        carrier = {name: ",".join(headers.getlist(name)) for name in ("traceparent", "tracestate") if name in headers}
        parent = self._propagator.extract(carrier, Context())
        about = {
            "http.request.method": method,
            "url.path": scope["path"][:MAX_PATH],
            "url.scheme": scope["scheme"],
        }
        return self._tracer.start_span(method, parent, SpanKind.SERVER, about)

    @staticmethod
    def headers(span: Span) -> dict[str, str]:
        """Return the header that names a span to the client, or none for a span without ids."""
        found = span.get_span_context()
        if not found.is_valid:
            return {}
        return {"traceparent": f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}"}

    def observe(self, event: Event) -> None:
        """End the span of an HTTP request, or make that of a batch's line."""
        if isinstance(event, HttpAnswered):
            if event.span is not None:
                self._end(event.span, event)
        elif isinstance(event, RequestEnded) and event.is_batch:
            begun_ns = time.time_ns() - round(event.seconds * _NS)
            span = self._tracer.start_span("batch", Context(), SpanKind.INTERNAL, start_time=begun_ns)
            if span.is_recording():
                span.set_attribute("quire.batch", True)
                self._describe(span, event.record, event.status)
            span.end()

    def _end(self, span: Span, event: HttpAnswered) -> None:
        if not span.is_recording():
            span.end()
            return
        span.update_name(f"POST {event.route}" if event.route != "unmatched" else "POST")
        route = None if event.route == "unmatched" else event.route
        answered = {"http.route": route, "http.response.status_code": event.status or None}
        span.set_attributes(_given({"quire.request.id": event.request_id, **answered}))
        if event.record is not None:
            self._describe(span, event.record, event.status)
        else:
            _mark(span, outcome_of(None, event.status))
        span.end()

    def _describe(self, span: Span, record: RequestRecord, status: int) -> None:
        """Add what is known of a generating request, and its children."""
        operation = OPERATIONS.get(record.endpoint)
        model = record.model if record.adapter is None else record.adapter
        if operation is not None:
            span.update_name(f"{operation.name} {model}")
        span.set_attributes(_asked(record, model) | _answered(record, model))
        _mark(span, outcome_of(record, status))
        self._add_children(span, record)

    def _add_children(self, span: Span, record: RequestRecord) -> None:
        """Add the spans of each prompt and choice that was scheduled, up to MAX_CHILDREN."""
        assert record.generation is not None
        offset_s = time.time() - self._clock()
        parent = set_span_in_context(span, Context())
        choices, first = record.generation.timeline.choices, 0
        parts: list[_Part] = []
        for index, request in enumerate(record.requests):
            own = choices[first : first + request.params.n]
            first += len(own)
            parts += _parts(request, own, {"quire.prompt.index": index} if len(record.requests) > 1 else {})
            if len(parts) >= MAX_CHILDREN:
                break
        for part in parts[:MAX_CHILDREN]:
            begun_ns = round((offset_s + part.begun_s) * _NS)
            child = self._tracer.start_span(part.name, parent, attributes=part.attributes, start_time=begun_ns)
            for preempted_s in part.preempted_s:
                child.add_event("quire.preempted", timestamp=round((offset_s + preempted_s) * _NS))
            child.end(begun_ns + round(part.seconds * _NS))


def outcome_of(record: RequestRecord | None, status: int) -> Outcome:
    """Return how a request ended: a stream that failed has the status 200."""
    choices: Sequence[ChoiceTimes] = ()
    if record is not None and record.generation is not None:
        choices = record.generation.timeline.choices
    for choice in choices:
        cause = choice.error
        if choice.finish_reason is FinishReason.ABORT:  # by the engine: what a client aborts is not reported
            cause = cause or ShuttingDownError("")
        if cause is not None and (error := to_api_error(cause)).status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return Outcome(error.code)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return Outcome(str(status))
    is_cut = status == HTTPStatus.OK and any(choice.finish_reason is None for choice in choices)
    return Outcome(None, is_abandoned=is_cut or status in (0, 499))


class _Part(NamedTuple):
    """A child span, in seconds of the engine's clock."""

    name: str
    begun_s: float
    seconds: float
    attributes: Attributes
    preempted_s: tuple[float, ...] = ()


def _parts(request: Request, choices: Sequence[ChoiceTimes], where: Attributes) -> list[_Part]:
    """Return the parts of a prompt: its wait and prefill, and the decoding of each choice."""
    begun = next((choice for choice in choices if choice.queue_s is not None), None)
    if begun is None or begun.queue_s is None:
        return []
    scheduled_s = request.arrival_s + begun.queue_s
    parts = [_Part("queue", request.arrival_s, begun.queue_s, where)]
    if begun.prefill_s > 0:
        about = where | {"quire.prompt.tokens": len(request.prompt)}
        parts.append(_Part("prefill", scheduled_s, begun.prefill_s, about))
    for index, choice in enumerate(choices):
        if choice.queue_s is None or not choice.num_tokens:
            continue
        about = where | _given(
            {
                "quire.choice.tokens": choice.num_tokens,
                "quire.choice.index": index if len(choices) > 1 else None,
                "quire.preemptions": choice.num_preemptions or None,
                "quire.draft.tokens": choice.num_drafted or None,
                "quire.draft.accepted_tokens": choice.num_accepted if choice.num_drafted else None,
            }
        )
        first_s = request.arrival_s + choice.queue_s + choice.prefill_s
        parts.append(_Part("decode", first_s, choice.decode_s, about, choice.preempted_s))
    return parts


def _mark(span: Span, outcome: Outcome) -> None:
    if outcome.error_type is not None:
        span.set_attribute("error.type", outcome.error_type)
        span.set_status(Status(StatusCode.ERROR))
    elif outcome.is_abandoned:  # no error, as the conventions say
        span.set_attribute("quire.abandoned", True)


def _asked(record: RequestRecord, model: str) -> Attributes:
    """Return the attributes of the request."""
    params, operation = record.requests[0].params, OPERATIONS.get(record.endpoint)
    attributes: dict[str, AttributeValue | None] = {
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": model,
        "gen_ai.operation.name": None if operation is None else operation.name,
        "quire.request.id": record.request_id,
        "quire.tenant": None if record.account is None else record.account.tenant.name,
    }
    if isinstance(params, SamplingParams) and params.max_tokens:  # else nothing is generated
        attributes |= {
            "gen_ai.request.stream": record.stream,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.choice.count": params.n if params.n > 1 else None,
            "gen_ai.request.top_k": params.top_k or None,
            "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
            "gen_ai.request.presence_penalty": params.presence_penalty or None,
        }
    return _given(attributes)


def _answered(record: RequestRecord, model: str) -> Attributes:
    """Return the attributes of the answer, whole or cut short."""
    outcome, operation = record.outcome, OPERATIONS.get(record.endpoint)
    usage, details = outcome.usage, outcome.usage.completion_tokens_details
    reasons = [reason.value for reason in outcome.finish_reasons if reason is not None]
    return _given(
        {
            "gen_ai.response.model": model,
            "gen_ai.response.id": operation.id_prefix + record.answer_id if operation and operation.id_prefix else None,
            "gen_ai.response.finish_reasons": reasons if reasons and usage.completion_tokens else None,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": outcome.num_cached_tokens,
            "gen_ai.usage.reasoning.output_tokens": (details and details.reasoning_tokens) or None,
            "quire.preemptions": (outcome.spans and outcome.spans.num_preemptions) or None,
        }
    )


def _given(attributes: Mapping[str, AttributeValue | None]) -> Attributes:
    return {name: value for name, value in attributes.items() if value is not None}
