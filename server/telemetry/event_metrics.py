"""The metrics that are counted from events, as rows of a table.

A metric is one row here. Those of `vllm_event_metrics` are exported with --metrics-compat vllm, under vLLM's names and labels;
requests are counted there as its users do: one of n choices is one request with n answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from engine.core.stats import REQUEST_BUCKETS_S
from engine.core.types import Request
from server.telemetry.events import (
    Event,
    FieldIgnored,
    GrammarCompiled,
    HttpAnswered,
    PrefillDelegated,
    RequestEnded,
    RequestOpened,
    TenantRefused,
)
from server.telemetry.timeline import CompletedChoice

MAX_NAMES = 64  # that clients choose; beyond this many they share the label "other"
_VLLM_SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
    7680.0,
)  # fmt: skip
_VLLM_CHOICES = (1, 2, 5, 10, 20)
_VLLM_LABELS = ("model_name", "engine")

Samples = Iterable[tuple[tuple[str, ...], float]]  # label values, and the amount to count or to observe


@dataclass(frozen=True, slots=True)
class EventMetric:
    """One row. `read` returns the samples in an event of type `events`."""

    kind: type[Counter | Gauge | Histogram]
    name: str
    help: str
    labels: tuple[str, ...]
    events: tuple[type[Event], ...]
    read: Callable[[Any], Samples]
    buckets: Sequence[float] = REQUEST_BUCKETS_S
    is_open_ended: bool = False  # clients choose the label's values
    first: tuple[str, ...] = ()  # label values that are exported before the first event


def _tenant(event: RequestOpened | RequestEnded, amount: float = 1) -> Samples:
    account = event.record.account
    return [] if account is None else [((account.tenant.name,), amount)]


def _tenant_tokens(event: RequestEnded) -> Samples:
    account, generation = event.record.account, event.record.generation
    if account is None or generation is None:
        return []
    name, usage = account.tenant.name, generation.usage
    return [((name, "prompt"), usage.prompt_tokens), ((name, "generation"), usage.completion_tokens)]


def _tenant_ttft(event: RequestEnded) -> Samples:
    account, generation = event.record.account, event.record.generation
    spans = None if generation is None else generation.timeline.spans()
    if account is None or generation is None or spans is None or not generation.usage.completion_tokens:
        return []
    return [((account.tenant.name,), spans.queue_s + spans.prefill_s)]


def _adapter(event: RequestOpened) -> Samples:
    name = event.record.adapter
    return [] if name is None else [((name,), len(event.record.requests))]


EVENT_METRICS = (
    EventMetric(
        Counter,
        "quire_http_requests_total",
        "HTTP requests answered.",
        ("route", "method", "status"),
        (HttpAnswered,),
        lambda e: [((e.route, e.method, str(e.status)), 1)],
    ),
    EventMetric(
        Histogram,
        "quire_http_request_duration_seconds",
        "HTTP request until its last byte.",
        ("route", "method"),
        (HttpAnswered,),
        lambda e: [((e.route, e.method), e.seconds)],
    ),
    EventMetric(
        Histogram,
        "quire_grammar_compile_seconds",
        "Compilation of a grammar for structured outputs; cached grammars are not compiled.",
        (),
        (GrammarCompiled,),
        lambda e: [((), e.seconds)],
    ),
    EventMetric(
        Counter,
        "quire_ignored_fields_total",
        "Unknown request fields and hints that could not be followed.",
        ("field",),
        (FieldIgnored,),
        lambda e: [((e.name,), 1)],
        is_open_ended=True,
    ),
    EventMetric(
        Counter,
        "quire_lora_requests_total",
        "Prompts answered with a LoRA adapter.",
        ("adapter",),
        (RequestOpened,),
        _adapter,
        is_open_ended=True,
    ),
    EventMetric(
        Counter,
        "quire_handoffs_total",
        "Prompts of a decode daemon, by whether their K/V came from its prefill daemon.",
        ("outcome",),
        (PrefillDelegated,),
        lambda e: [((e.outcome,), 1)],
    ),
    EventMetric(
        Gauge,
        "quire_tenant_requests_open",
        "Open requests of a tenant.",
        ("tenant",),
        (RequestOpened, RequestEnded),
        lambda e: _tenant(e, 1 if isinstance(e, RequestOpened) else -1),
    ),
    EventMetric(
        Counter,
        "quire_tenant_requests_refused_total",
        "Requests refused for a limit of --tenants.",
        ("tenant", "limit"),
        (TenantRefused,),
        lambda e: [((e.tenant, e.limit), 1)],
    ),
    EventMetric(Counter, "quire_tenant_requests_total", "Requests ended.", ("tenant",), (RequestEnded,), _tenant),
    EventMetric(
        Counter,
        "quire_tenant_tokens_total",
        "Tokens of requests that ended, as their usage counts them: of the prompt or generated.",
        ("tenant", "kind"),
        (RequestEnded,),
        _tenant_tokens,
    ),
    EventMetric(
        Histogram,
        "quire_tenant_time_to_first_token_seconds",
        "Arrival until the first token.",
        ("tenant",),
        (RequestEnded,),
        _tenant_ttft,
    ),
)


def _completed(event: RequestEnded) -> Iterator[tuple[Request, list[CompletedChoice]]]:
    """Yield the requests whose choices all completed. Lines of batches are left out."""
    generation = event.record.generation
    choices = [] if generation is None or event.is_batch else generation.timeline.completed()
    start = 0
    for request in event.record.requests if choices else ():
        own = choices[start : start + request.params.n]
        start += request.params.n
        completed = [choice for choice in own if choice is not None]
        if len(completed) == len(own):
            yield request, completed


def _steps_to(limit: int) -> Iterator[int]:
    """Yield 1, 2, 5, 10, 20, 50, ... up to a limit."""
    scale = 1
    while True:
        for step in (scale, 2 * scale, 5 * scale):
            if step > limit:
                return
            yield step
        scale *= 10


def vllm_event_metrics(model_name: str, max_model_len: int) -> list[EventMetric]:
    """Return the rows of --metrics-compat vllm."""
    own, tokens = (model_name, "0"), tuple(_steps_to(max_model_len))

    def row(
        name: str, text: str, buckets: Sequence[float], read: Callable[[Request, list[CompletedChoice]], list[float]]
    ) -> EventMetric:
        def samples(event: RequestEnded) -> Samples:
            return [(own, value) for each in _completed(event) for value in read(*each)]

        return EventMetric(Histogram, name, text, _VLLM_LABELS, (RequestEnded,), samples, buckets, first=own)

    return [
        row(
            "vllm:request_inference_time_seconds",
            "First scheduled until the last token, of each choice.",
            _VLLM_SECONDS,
            lambda _, choices: [choice.inference_s for choice in choices],
        ),
        row(
            "vllm:request_params_n",
            "The parameter n of completed requests.",
            _VLLM_CHOICES,
            lambda request, _: [request.params.n],
        ),
        row(
            "vllm:request_params_max_tokens",
            "The parameter max_tokens of completed requests.",
            tokens,
            lambda request, _: [request.params.max_tokens] if request.params.max_tokens else [],
        ),
        row(
            "vllm:request_max_num_generation_tokens",
            "Tokens of the longest choice of completed requests.",
            tokens,
            lambda _, choices: [max(choice.num_tokens for choice in choices)],
        ),
    ]


class EventCounts:
    """Counts events into the metrics of a table."""

    def __init__(self, registry: CollectorRegistry, rows: Iterable[EventMetric]) -> None:
        self._rows: dict[type[Event], list[tuple[EventMetric, Any]]] = {}
        self._names: dict[str, set[str]] = {}
        for row in rows:
            buckets = {"buckets": row.buckets} if row.kind is Histogram else {}
            metric = row.kind(row.name, row.help, row.labels, registry=registry, **buckets)  # type: ignore[arg-type]
            if row.first:
                metric.labels(*row.first)
            for event in row.events:
                self._rows.setdefault(event, []).append((row, metric))

    def observe(self, event: Event) -> None:
        """Count one event. Any thread."""
        for row, metric in self._rows.get(type(event), ()):
            for labels, amount in row.read(event):
                if row.is_open_ended:
                    labels = (self._known(row.name, labels[0]),)
                own = metric.labels(*labels) if labels else metric
                if isinstance(metric, Histogram):
                    own.observe(amount)
                else:
                    own.inc(amount)

    def _known(self, metric: str, name: str) -> str:
        known = self._names.setdefault(metric, set())
        if len(known) < MAX_NAMES:
            known.add(name)
        return name if name in known else "other"
