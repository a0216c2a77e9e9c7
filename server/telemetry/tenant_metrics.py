"""What /metrics shows of tenants: those of --tenants, so that nobody who calls chooses a label. Event loop, a few calls a request."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from engine.core.stats import REQUEST_BUCKETS_S
from server.openai.usage import Usage
from server.telemetry.timeline import Spans


class TenantMetrics:
    """Counts requests from their admission to their end."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._open = Gauge("quire_tenant_requests_open", "Requests of a tenant's.", ("tenant",), registry=registry)
        self._refused = Counter(
            "quire_tenant_requests_refused_total",
            "Requests refused for a limit of --tenants.",
            ("tenant", "limit"),
            registry=registry,
        )
        self._ended = Counter("quire_tenant_requests_total", "Requests ended.", ("tenant",), registry=registry)
        self._tokens = Counter(
            "quire_tenant_tokens_total",
            "Tokens of requests that ended, as their usage counts them: of the prompt or generated.",
            ("tenant", "kind"),
            registry=registry,
        )
        self._ttft = Histogram(
            "quire_tenant_time_to_first_token_seconds",
            "Arrival until the first token.",
            ("tenant",),
            buckets=REQUEST_BUCKETS_S,
            registry=registry,
        )

    def refused(self, tenant: str, limit: str) -> None:
        """A request was turned away."""
        self._refused.labels(tenant, limit).inc()

    def opened(self, tenant: str) -> None:
        """A request was admitted."""
        self._open.labels(tenant).inc()

    def closed(self, tenant: str, usage: Usage, spans: Spans | None) -> None:
        """It has ended, whichever way."""
        self._open.labels(tenant).dec()
        self._ended.labels(tenant).inc()
        self._tokens.labels(tenant, "prompt").inc(usage.prompt_tokens)
        self._tokens.labels(tenant, "generation").inc(usage.completion_tokens)
        if spans is not None and usage.completion_tokens:
            self._ttft.labels(tenant).observe(spans.queue_s + spans.prefill_s)
