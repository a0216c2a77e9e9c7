"""The metrics that are counted from events."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from engine.core.stats import REQUEST_BUCKETS_S
from server.telemetry.events import (
    Event,
    FieldIgnored,
    HttpAnswered,
    PrefillDelegated,
    RequestEnded,
    RequestOpened,
    TenantRefused,
)

MAX_NAMES = 64  # that clients choose; beyond this many they share the label "other"


class EventMetrics:
    """Quire's metrics of events."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(name, text, labels, registry=registry, buckets=REQUEST_BUCKETS_S)

        self._answered = counter("quire_http_requests_total", "HTTP requests answered.", "route", "method", "status")
        self._answer_s = histogram(
            "quire_http_request_duration_seconds", "HTTP request until its last byte.", "route", "method"
        )
        self._ignored = counter(
            "quire_ignored_fields_total", "Unknown request fields and hints that could not be followed.", "field"
        )
        self._adapters = counter("quire_lora_requests_total", "Prompts answered with a LoRA adapter.", "adapter")
        self._handoffs = counter(
            "quire_handoffs_total",
            "Prompts of a decode daemon, by whether their K/V came from its prefill daemon.",
            "outcome",
        )
        self._open = Gauge("quire_tenant_requests_open", "Open requests of a tenant.", ["tenant"], registry=registry)
        self._refused = counter(
            "quire_tenant_requests_refused_total", "Requests refused for a limit of --tenants.", "tenant", "limit"
        )
        self._ended = counter("quire_tenant_requests_total", "Requests ended.", "tenant")
        self._tokens = counter(
            "quire_tenant_tokens_total",
            "Tokens of requests that ended, as their usage counts them: of the prompt or generated.",
            "tenant",
            "kind",
        )
        self._ttft_s = histogram("quire_tenant_time_to_first_token_seconds", "Arrival until the first token.", "tenant")
        self._prefixes = counter(
            "quire_prefix_ends_total",
            "Prompts of requests that generate from one, by why the prefix that was reused ends where it does.",
            "cause",
        )
        self._fields, self._adapter_names = _Names(), _Names()

    def observe(self, event: Event) -> None:
        """Count one event. Any thread."""
        if isinstance(event, HttpAnswered):
            self._answered.labels(event.route, event.method, str(event.status)).inc()
            self._answer_s.labels(event.route, event.method).observe(event.seconds)
        elif isinstance(event, RequestOpened):
            record = event.record
            if record.adapter is not None:
                self._adapters.labels(self._adapter_names.known(record.adapter)).inc(len(record.requests))
            if record.account is not None:
                self._open.labels(record.account.tenant.name).inc()
        elif isinstance(event, RequestEnded):
            self._observe_end(event)
        elif isinstance(event, FieldIgnored):
            self._ignored.labels(self._fields.known(event.name)).inc()
        elif isinstance(event, PrefillDelegated):
            self._handoffs.labels(event.outcome).inc()
        elif isinstance(event, TenantRefused):
            self._refused.labels(event.tenant, event.limit).inc()

    def _observe_end(self, event: RequestEnded) -> None:
        account, generation = event.record.account, event.record.generation
        if event.record.turn is not None and (prefix := event.record.outcome.prefix) is not None:
            self._prefixes.labels(prefix.cause.value).inc()
        if account is None:
            return
        tenant = account.tenant.name
        self._open.labels(tenant).dec()
        self._ended.labels(tenant).inc()
        if generation is not None:
            usage, spans = generation.usage, generation.timeline.spans()
            self._tokens.labels(tenant, "prompt").inc(usage.prompt_tokens)
            self._tokens.labels(tenant, "generation").inc(usage.completion_tokens)
            if spans is not None and usage.completion_tokens:
                self._ttft_s.labels(tenant).observe(spans.queue_s + spans.prefill_s)


class _Names:
    """The first names that clients chose for a label."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def known(self, name: str) -> str:
        """Return the name, or "other" if there are too many."""
        if len(self._names) < MAX_NAMES:
            self._names.add(name)
        return name if name in self._names else "other"
