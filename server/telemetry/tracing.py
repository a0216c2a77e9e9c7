"""Traces requests: one server span each, with the children queue, prefill and decode.

The server span begins and ends with the HTTP request; a line of a batch has a span without one. The children are made at
the end, from the times that the engine reported with the answer, on the engine's clock. No span contains text of a prompt
or of an answer. Event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import NamedTuple

from opentelemetry.context import Context
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, TracerProvider, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers
from starlette.types import Scope

from engine.core.errors import ShuttingDownError
from engine.core.types import FinishReason, Request
from engine.system.version import VERSION
from server.protocol.errors import to_api_error
from server.telemetry import gen_ai
from server.telemetry.events import TRACE_HEADERS, ChoiceTimes, Event, HttpAnswered, RequestEnded, RequestRecord

MAX_CHILDREN = 64  # spans of one request; one with a thousand choices would fill the queue
MAX_PATH = 256  # characters, of a route or not
_SCOPE = "quire"
_NS = 1_000_000_000

Attributes = dict[str, AttributeValue]


class Outcome(NamedTuple):
    """How a request ended, as spans and metrics report it."""

    error_type: str | None  # of a failure of the server, never of the client
    is_abandoned: bool = False  # the client left before the end


class Tracing:
    """Begins spans, writes them into headers, and ends them as events say."""

    def __init__(self, tracers: TracerProvider, model_name: str, clock: Callable[[], float]) -> None:
        """`clock` is the engine's."""
        self._tracer: Tracer = tracers.get_tracer(_SCOPE, VERSION, gen_ai.SCHEMA_URL)
        self._model_name = model_name
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
            gen_ai.HTTP_METHOD: method,
            gen_ai.URL_PATH: scope["path"][:MAX_PATH],
            gen_ai.URL_SCHEME: scope["scheme"],
        }
        span = self._tracer.start_span(method, parent, SpanKind.SERVER, about)
        onward: dict[str, str] = {}
        self._propagator.inject(onward, set_span_in_context(span, Context()))
        TRACE_HEADERS.set(onward)
        return span

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
                span.set_attribute(gen_ai.QUIRE_BATCH, True)
                self._describe(span, event.record, event.status)
            span.end()

    def _end(self, span: Span, event: HttpAnswered) -> None:
        if not span.is_recording():
            span.end()
            return
        span.update_name(f"POST {event.route}" if event.route != "unmatched" else "POST")
        attributes: Attributes = {gen_ai.QUIRE_REQUEST_ID: event.request_id}
        if event.route != "unmatched":
            attributes[gen_ai.HTTP_ROUTE] = event.route
        if event.status:
            attributes[gen_ai.HTTP_STATUS] = event.status
        span.set_attributes(attributes)
        if event.record is not None:
            self._describe(span, event.record, event.status)
        else:
            _mark(span, outcome_of(None, event.status))
        span.end()

    def _describe(self, span: Span, record: RequestRecord, status: int) -> None:
        """Add what is known of a generating request, and its children."""
        operation = gen_ai.OPERATIONS.get(record.endpoint)
        model = model_of(record, self._model_name)
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
            parts += _parts(request, own, {gen_ai.QUIRE_PROMPT: index} if len(record.requests) > 1 else {})
            if len(parts) >= MAX_CHILDREN:
                break
        for part in parts[:MAX_CHILDREN]:
            begun_ns = round((offset_s + part.begun_s) * _NS)
            child = self._tracer.start_span(part.name, parent, attributes=part.attributes, start_time=begun_ns)
            for preempted_s in part.preempted_s:
                child.add_event(gen_ai.QUIRE_PREEMPTED, timestamp=round((offset_s + preempted_s) * _NS))
            child.end(begun_ns + round(part.seconds * _NS))


class GenAiMetrics:
    """The conventions' histograms of model servers. One observation is one request, of n choices the slowest."""

    def __init__(self, meters: MeterProvider, model_name: str) -> None:
        meter = meters.get_meter(_SCOPE, VERSION, gen_ai.SCHEMA_URL)
        self._model_name = model_name
        self._duration, self._first, self._per_token = (
            meter.create_histogram(
                each.name, "s", each.description, explicit_bucket_boundaries_advisory=list(each.bounds)
            )
            for each in (gen_ai.REQUEST_DURATION, gen_ai.TIME_TO_FIRST_TOKEN, gen_ai.TIME_PER_OUTPUT_TOKEN)
        )

    def observe(self, event: Event) -> None:
        """Record a request that ended; lines of batches, and what its client abandoned, are left out."""
        if not isinstance(event, RequestEnded) or event.is_batch or event.record.generation is None:
            return
        outcome = outcome_of(event.record, event.status)
        operation = gen_ai.OPERATIONS.get(event.record.endpoint)
        if operation is None or outcome.is_abandoned:
            return
        model = model_of(event.record, self._model_name)
        attributes: Attributes = {
            gen_ai.OPERATION: operation.name,
            gen_ai.PROVIDER: gen_ai.PROVIDER_NAME,
            gen_ai.REQUEST_MODEL: model,
            gen_ai.RESPONSE_MODEL: model,
        }
        if outcome.error_type is not None:
            self._duration.record(event.seconds, attributes | {gen_ai.ERROR_TYPE: outcome.error_type})
            return
        self._duration.record(event.seconds, attributes)
        generation = event.record.generation
        spans = generation.timeline.spans()
        if spans is None or not generation.usage.completion_tokens:
            return
        self._first.record(spans.queue_s + spans.prefill_s, attributes)
        if spans.mean_itl_s is not None:
            self._per_token.record(spans.mean_itl_s, attributes)


def model_of(record: RequestRecord, model_name: str) -> str:
    """Return the adapter that answered, or the model."""
    return model_name if record.adapter is None else record.adapter


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
        about = where | {gen_ai.QUIRE_PROMPT_TOKENS: len(request.prompt)}
        parts.append(_Part("prefill", scheduled_s, begun.prefill_s, about))
    for index, choice in enumerate(choices):
        if choice.queue_s is None or not choice.num_tokens:
            continue
        about = where | {gen_ai.QUIRE_TOKENS: choice.num_tokens}
        if len(choices) > 1:
            about[gen_ai.QUIRE_CHOICE] = index
        if choice.num_preemptions:
            about[gen_ai.QUIRE_PREEMPTIONS] = choice.num_preemptions
        if choice.num_drafted:
            about |= {gen_ai.QUIRE_DRAFTED: choice.num_drafted, gen_ai.QUIRE_ACCEPTED: choice.num_accepted}
        first_s = request.arrival_s + choice.queue_s + choice.prefill_s
        parts.append(_Part("decode", first_s, choice.decode_s, about, choice.preempted_s))
    return parts


def _mark(span: Span, outcome: Outcome) -> None:
    if outcome.error_type is not None:
        span.set_attribute(gen_ai.ERROR_TYPE, outcome.error_type)
        span.set_status(Status(StatusCode.ERROR))
    elif outcome.is_abandoned:  # no error, as the conventions say
        span.set_attribute(gen_ai.QUIRE_ABANDONED, True)


def _asked(record: RequestRecord, model: str) -> Attributes:
    """Return the attributes of the request."""
    params = record.requests[0].params
    attributes: Attributes = {
        gen_ai.PROVIDER: gen_ai.PROVIDER_NAME,
        gen_ai.REQUEST_MODEL: model,
        gen_ai.QUIRE_REQUEST_ID: record.request_id,
    }
    if operation := gen_ai.OPERATIONS.get(record.endpoint):
        attributes[gen_ai.OPERATION] = operation.name
    if record.account is not None:
        attributes[gen_ai.QUIRE_TENANT] = record.account.tenant.name
    if not params.max_tokens:
        return attributes  # nothing is generated
    attributes |= {
        gen_ai.REQUEST_STREAM: record.stream,
        gen_ai.REQUEST_MAX_TOKENS: params.max_tokens,
        gen_ai.REQUEST_TEMPERATURE: params.temperature,
        gen_ai.REQUEST_TOP_P: params.top_p,
    }
    if params.n > 1:
        attributes[gen_ai.REQUEST_CHOICES] = params.n
    if params.top_k:
        attributes[gen_ai.REQUEST_TOP_K] = params.top_k
    if params.frequency_penalty:
        attributes[gen_ai.REQUEST_FREQUENCY_PENALTY] = params.frequency_penalty
    if params.presence_penalty:
        attributes[gen_ai.REQUEST_PRESENCE_PENALTY] = params.presence_penalty
    return attributes


def _answered(record: RequestRecord, model: str) -> Attributes:
    """Return the attributes of the answer, whole or cut short."""
    outcome = record.outcome
    attributes: Attributes = {
        gen_ai.RESPONSE_MODEL: model,
        gen_ai.INPUT_TOKENS: outcome.usage.prompt_tokens,
        gen_ai.OUTPUT_TOKENS: outcome.usage.completion_tokens,
        gen_ai.CACHED_TOKENS: outcome.num_cached_tokens,
    }
    operation = gen_ai.OPERATIONS.get(record.endpoint)
    if operation is not None and operation.id_prefix:
        attributes[gen_ai.RESPONSE_ID] = operation.id_prefix + record.answer_id
    details = outcome.usage.completion_tokens_details
    if details is not None and details.reasoning_tokens:
        attributes[gen_ai.REASONING_TOKENS] = details.reasoning_tokens
    reasons = [reason.value for reason in outcome.finish_reasons if reason is not None]
    if reasons and outcome.usage.completion_tokens:
        attributes[gen_ai.RESPONSE_FINISH_REASONS] = reasons
    if outcome.spans is not None and outcome.spans.num_preemptions:
        attributes[gen_ai.QUIRE_PREEMPTIONS] = outcome.spans.num_preemptions
    return attributes
