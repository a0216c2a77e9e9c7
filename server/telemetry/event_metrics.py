"""The metrics that are counted from events.

Each class counts an event in `observe`. With --metrics-compat vllm, requests are counted under vLLM's names and labels as its
users do: one of n choices is one request with n answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from prometheus_client import CollectorRegistry, Histogram

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
    """Quire's metrics of events, by name: the rows `events` of metric_rows.json."""

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self._metrics = metrics
        self._fields, self._adapters = _Names(), _Names()

    def _of(self, name: str, *labels: str) -> Any:
        """Return a metric with the values of its labels."""
        return self._metrics[name].labels(*labels)

    def observe(self, event: Event) -> None:
        """Count one event. Any thread."""
        if isinstance(event, HttpAnswered):
            self._of("quire_http_requests_total", event.route, event.method, str(event.status)).inc()
            self._of("quire_http_request_duration_seconds", event.route, event.method).observe(event.seconds)
        elif isinstance(event, RequestOpened):
            record = event.record
            if record.adapter is not None:
                adapter = self._adapters.known(record.adapter)
                self._of("quire_lora_requests_total", adapter).inc(len(record.requests))
            if record.account is not None:
                self._of("quire_tenant_requests_open", record.account.tenant.name).inc()
        elif isinstance(event, RequestEnded):
            self._observe_end(event)
        elif isinstance(event, FieldIgnored):
            self._of("quire_ignored_fields_total", self._fields.known(event.name)).inc()
        elif isinstance(event, PrefillDelegated):
            self._of("quire_handoffs_total", event.outcome).inc()
        elif isinstance(event, TenantRefused):
            self._of("quire_tenant_requests_refused_total", event.tenant, event.limit).inc()

    def _observe_end(self, event: RequestEnded) -> None:
        account, generation = event.record.account, event.record.generation
        if event.record.turn is not None and (prefix := event.record.outcome.prefix) is not None:
            self._of("quire_prefix_ends_total", prefix.cause.value).inc()
        if account is None:
            return
        tenant = account.tenant.name
        self._of("quire_tenant_requests_open", tenant).dec()
        self._of("quire_tenant_requests_total", tenant).inc()
        if generation is not None:
            usage, spans = generation.usage, generation.timeline.spans()
            self._of("quire_tenant_tokens_total", tenant, "prompt").inc(usage.prompt_tokens)
            self._of("quire_tenant_tokens_total", tenant, "generation").inc(usage.completion_tokens)
            if spans is not None and usage.completion_tokens:
                self._of("quire_tenant_time_to_first_token_seconds", tenant).observe(spans.queue_s + spans.prefill_s)


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
