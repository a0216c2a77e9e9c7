"""The metrics that are counted from events.

Each class lists its metrics in `__init__` and counts an event into them in `observe`. With --metrics-compat vllm, requests
are counted under vLLM's names and labels as its users do: one of n choices is one request with n answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

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
_VLLM_SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
    7680.0,
)  # fmt: skip
_VLLM_CHOICES = (1, 2, 5, 10, 20)


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


class VllmEventMetrics:
    """Metrics of completed requests under vLLM's names, without lines of batches."""

    def __init__(self, registry: CollectorRegistry, model_name: str, max_model_len: int) -> None:
        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            metric = Histogram(name, text, ["model_name", "engine"], registry=registry, buckets=buckets)
            return metric.labels(model_name, "0")

        self._inference_s = histogram(
            "vllm:request_inference_time_seconds",
            "First scheduled until the last token, of each choice.",
            _VLLM_SECONDS,
        )
        self._n = histogram("vllm:request_params_n", "The parameter n of completed requests.", _VLLM_CHOICES)
        self._max_tokens = histogram(
            "vllm:request_params_max_tokens",
            "The parameter max_tokens of completed requests.",
            _steps_to(max_model_len),
        )
        self._longest = histogram(
            "vllm:request_max_num_generation_tokens",
            "Tokens of the longest choice of completed requests.",
            _steps_to(max_model_len),
        )

    def observe(self, event: Event) -> None:
        """Count the requests of an answer whose choices all completed."""
        if not isinstance(event, RequestEnded) or event.is_batch or event.record.generation is None:
            return
        choices = iter(event.record.generation.timeline.choices)
        for request in event.record.requests:
            own = list(islice(choices, request.params.n))
            if not all(choice.is_completed for choice in own):
                continue
            for choice in own:
                self._inference_s.observe(choice.prefill_s + choice.decode_s)
            self._n.observe(len(own))
            if request.params.max_tokens:
                self._max_tokens.observe(request.params.max_tokens)
            self._longest.observe(max(choice.num_tokens for choice in own))


def _steps_to(limit: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, 50, ... up to a limit."""
    steps = [step * 10**power for power in range(len(str(limit))) for step in (1, 2, 5)]
    return [step for step in steps if step <= limit]
