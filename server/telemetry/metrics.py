"""Exports metrics to Prometheus: the engine's statistics and event counts.

The engine counts in plain numbers (engine/core/stats.py) and never calls Prometheus; a scrape turns them into text on the
event loop thread. metric_rows.py has the engine's metrics as rows, event_metrics.py those of events.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Mapping

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Gauge,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from engine.loop import Engine
from engine.version import VERSION
from server.telemetry.event_metrics import EVENT_METRICS, EventCounts, vllm_event_metrics
from server.telemetry.loop_lag import LoopLag
from server.telemetry.metric_rows import METRICS, VLLM_METRICS, Family


class EngineCollector(Collector):
    """Reads the engine's statistics at each scrape."""

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
        """Return the metric that vLLM's routers read: the value is the time, the labels are lists."""
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
    """Everything that /metrics shows. Event loop thread, except where a method says otherwise."""

    def __init__(self, engine: Engine, model_name: str, compat_vllm: bool) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine, model_name, compat_vllm))
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        vllm = vllm_event_metrics(model_name, engine.config.max_model_len) if compat_vllm else []
        self.counts = EventCounts(self._registry, [*EVENT_METRICS, *vllm])
        self.loop_lag = LoopLag()
        Gauge(
            "quire_event_loop_lag_seconds",
            "Longest time that the event loop was held up, in the last half minute to a minute.",
            registry=self._registry,
        ).set_function(lambda: self.loop_lag.seconds)

    def render(self) -> tuple[bytes, str]:
        """Return the exposition and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
