"""The metrics endpoint: engine statistics as Prometheus families, read when scraped.

The engine counts in plain numbers (engine/core/stats.py) and never calls Prometheus; a scrape turns them into text on
the event loop thread. What there is to tell of the engine is a table, server/telemetry/metric_rows.py. What only the front knows (HTTP requests, ignored fields) is counted
here, once a request, never once a token.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client import Histogram as PrometheusHistogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from engine.core.stats import (
    REQUEST_BUCKETS_S,
)
from engine.core.types import Request
from engine.loop import Engine
from engine.version import VERSION
from server.operations.handoff import HandoffOutcome
from server.telemetry.loop_lag import LoopLag
from server.telemetry.metric_rows import METRICS, VLLM_METRICS, Family
from server.telemetry.tenant_metrics import TenantMetrics
from server.telemetry.timeline import Timeline
from server.telemetry.vllm_metrics import VllmRequestMetrics

MAX_NAMES = 64  # that clients choose; beyond this many they share the label "other"


class EngineCollector(Collector):
    """Reads the engine when Prometheus asks."""

    def __init__(self, engine: Engine, model_name: str, compat_vllm: bool) -> None:
        self._engine = engine
        self._labels = {"model_name": model_name}
        self._compat_vllm = compat_vllm

    def collect(self) -> Iterator[Family]:
        stats = self._engine.stats
        for metric in METRICS:
            yield metric.family(stats, self._labels)
        yield from self._health()
        yield self._adapters()
        yield from self._info()
        if self._compat_vllm:
            labels = {**self._labels, "engine": "0"}
            for metric in VLLM_METRICS:
                yield metric.family(stats, labels)
            if self._engine.adapters.max_loras:
                yield self._lora_requests()

    def _health(self) -> Iterator[Family]:
        health = self._engine.health()
        for name, help_text, value in (
            ("quire_engine_alive", "1 while the engine thread lives, 0 once it has died.", health.alive),
            ("quire_engine_busy", "1 while the engine has work.", health.busy),
            (
                "quire_engine_seconds_since_step",
                "Seconds since the last step ended; 0 while idle.",
                health.seconds_since_step,
            ),
        ):
            family = GaugeMetricFamily(name, help_text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), float(value))
            yield family

    def _adapters(self) -> Family:
        family = GaugeMetricFamily(
            "quire_lora_adapters", "LoRA adapters that requests may name.", labels=list(self._labels)
        )
        family.add_metric(list(self._labels.values()), len(self._engine.adapters.all()))
        return family

    def _lora_requests(self) -> Family:
        """As vLLM tells it to routers: the value is the time, the labels are lists."""
        running, waiting = self._engine.adapters_in_use()
        labels = {
            "max_lora": str(self._engine.adapters.max_loras),
            "waiting_lora_adapters": ",".join(waiting),
            "running_lora_adapters": ",".join(running),
        }
        text = "LoRA adapters that running and waiting requests use; the value is when they were read."
        return _info("vllm:lora_requests_info", text, labels, time.time())

    def _info(self) -> Iterator[Family]:
        config = self._engine.config
        settings = {
            "block_size": str(config.block_size),
            "num_blocks": str(config.num_blocks),
            "num_host_blocks": str(config.num_host_blocks),
            "max_model_len": str(config.max_model_len),
            "max_num_seqs": str(config.max_num_seqs),
            "max_num_batched_tokens": str(config.max_num_batched_tokens),
            "enable_prefix_caching": str(config.enable_prefix_caching).lower(),
            "scheduling_policy": config.policy,
        }
        build = {"version": VERSION, "python": platform.python_version()}
        yield _info("quire_build_info", "What is running.", self._labels | build)
        yield _info("quire_config_info", "The engine's settings as resolved at start-up.", self._labels | settings)
        if self._compat_vllm:
            cache = {
                "engine": "0",
                "block_size": settings["block_size"],
                "num_gpu_blocks": settings["num_blocks"],
                "enable_prefix_caching": str(config.enable_prefix_caching),
            }
            yield _info("vllm:cache_config_info", "KV cache settings.", cache)


def _info(name: str, help_text: str, labels: Mapping[str, str], value: float = 1.0) -> Family:
    family = GaugeMetricFamily(name, help_text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


class Metrics:
    """All that /metrics shows. Event loop thread only, but where it says otherwise."""

    def __init__(self, engine: Engine, model_name: str, compat_vllm: bool) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine, model_name, compat_vllm))
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        self._http_requests = Counter(
            "quire_http_requests_total",
            "HTTP requests answered.",
            ("route", "method", "status"),
            registry=self._registry,
        )
        self._http_seconds = PrometheusHistogram(
            "quire_http_request_duration_seconds",
            "HTTP request until its last byte.",
            ("route", "method"),
            buckets=REQUEST_BUCKETS_S,
            registry=self._registry,
        )
        self._grammar_seconds = PrometheusHistogram(
            "quire_grammar_compile_seconds",
            "Compilation of a grammar for structured outputs; those that are kept already are not compiled.",
            buckets=REQUEST_BUCKETS_S,
            registry=self._registry,
        )
        self._ignored = Counter(
            "quire_ignored_fields_total",
            "Unknown request fields and hints that could not be followed.",
            ("field",),
            registry=self._registry,
        )
        self._adapter_requests = Counter(
            "quire_lora_requests_total",
            "Prompts answered with a LoRA adapter.",
            ("adapter",),
            registry=self._registry,
        )
        self._handoffs = Counter(
            "quire_handoffs_total",
            "Prompts of a decode daemon, by whether their K/V came from its prefill daemon.",
            ("outcome",),
            registry=self._registry,
        )
        self.loop_lag = LoopLag()
        Gauge(
            "quire_event_loop_lag_seconds",
            "Longest time that the event loop was held up, in the last half minute to a minute.",
            registry=self._registry,
        ).set_function(lambda: self.loop_lag.seconds)
        self._names: dict[Counter, set[str]] = {self._ignored: set(), self._adapter_requests: set()}
        self.tenants = TenantMetrics(self._registry)
        length = engine.config.max_model_len
        self._vllm = VllmRequestMetrics(self._registry, model_name, length) if compat_vllm else None

    def http_request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count one answered request. `route` is the route's template, never a raw path."""
        self._http_requests.labels(route, method, str(status)).inc()
        self._http_seconds.labels(route, method).observe(seconds)

    def generation_ended(self, requests: Sequence[Request], timeline: Timeline) -> None:
        """Count what an answer's requests came to."""
        if self._vllm is not None:
            self._vllm.ended(requests, timeline.completed())

    def grammar_compiled(self, seconds: float) -> None:
        """Count one grammar, well-formed or not. Any thread."""
        self._grammar_seconds.observe(seconds)

    def ignored_field(self, name: str) -> None:
        """Count one request field that was let through without meaning."""
        self._count(self._ignored, name)

    def handoff(self, outcome: HandoffOutcome) -> None:
        """Count a prompt that a prefill daemon might have computed."""
        self._handoffs.labels(outcome.value).inc()

    def adapter_request(self, name: str, num_prompts: int) -> None:
        """Count what an adapter is asked."""
        self._count(self._adapter_requests, name, num_prompts)

    def _count(self, counter: Counter, name: str, number: int = 1) -> None:
        known = self._names[counter]
        if len(known) < MAX_NAMES:
            known.add(name)
        counter.labels(name if name in known else "other").inc(number)

    def render(self) -> tuple[bytes, str]:
        """The exposition and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
