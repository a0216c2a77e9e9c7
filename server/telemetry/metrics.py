"""Exports metrics to Prometheus: the engine's statistics and event counts.

The engine counts in plain numbers (engine/core/stats.py) and never calls Prometheus; a scrape turns them into text on the
event loop thread. metric_rows.py has the engine's metrics as rows, event_metrics.py those of events.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Gauge,
    GCCollector,
    Info,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from engine.handle import EngineHandle
from engine.system.version import VERSION
from server.telemetry.event_metrics import EventMetrics, VllmEventMetrics
from server.telemetry.events import Listener
from server.telemetry.loop_lag import LoopLag
from server.telemetry.metric_rows import METRICS, ROWS, VLLM_METRICS, Family, Metric


class RowCollector(Collector):
    """Reads rows from counts, such as the engine's statistics, at each scrape."""

    def __init__(self, read: Callable[[], object], rows: tuple[Metric, ...], **labels: str) -> None:
        self._read, self.rows, self._labels = read, rows, labels

    def collect(self) -> Iterator[Family]:
        for metric in self.rows:
            yield metric.family(self._read(), self._labels)


class LoraCollector(Collector):
    """The metric that vLLM's routers read: its labels are lists, its value the time."""

    def __init__(self, engine: EngineHandle) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Family]:
        stats = self._engine.stats
        waiting, running = (",".join(sorted(each)) for each in (stats.adapters_waiting, stats.adapters_running))
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "LoRA adapters that running and waiting requests use; the value is when they were read.",
            labels=["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
        )
        family.add_metric((str(self._engine.facts.max_loras), waiting, running), time.time())
        yield family


class Metrics:
    """Everything that /metrics shows; `listeners` count events. Event loop."""

    def __init__(self, engine: EngineHandle, model_name: str, compat_vllm: bool) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self.loop_lag = LoopLag()
        self._registry.register(RowCollector(lambda: engine.stats, METRICS, model_name=model_name))
        self._registry.register(RowCollector(lambda: engine.stats, ROWS["grammars"]))
        self._add_engine(engine)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        self.listeners: list[Listener] = [EventMetrics(self._registry).observe]  # any thread
        if compat_vllm:
            self._add_vllm(engine)
        Gauge(
            "quire_event_loop_lag_seconds",
            "Longest time that the event loop was held up, in the last half minute to a minute.",
            registry=self._registry,
        ).set_function(lambda: self.loop_lag.seconds)

    def render(self) -> tuple[bytes, str]:
        """Return the exposition and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def collectors(self) -> list[Collector]:
        """Return everything that is registered, for the reference."""
        return list(self._registry._collector_to_names)  # noqa: SLF001

    def add_counts(self, group: str, counts: object) -> None:
        """Export the rows of a group, such as what became of spans, which do not exist where nothing counts them."""
        self._registry.register(RowCollector(lambda: counts, ROWS[group]))

    def _add_engine(self, engine: EngineHandle) -> None:
        """Add the engine's health, adapters and settings."""
        self._gauge(
            "quire_engine_alive", "1 while the engine thread lives, 0 once it has died.", lambda: engine.health().alive
        )
        self._gauge("quire_engine_busy", "1 while the engine has work.", lambda: engine.health().busy)
        self._gauge(
            "quire_engine_seconds_since_step",
            "Seconds since the last step ended; 0 while idle.",
            lambda: engine.health().seconds_since_step,
        )
        self._gauge("quire_lora_adapters", "LoRA adapters that requests may name.", lambda: len(engine.adapters))
        config = engine.config
        self._info("quire_build", "What is running.", version=VERSION, python=platform.python_version())
        self._info(
            "quire_config",
            "The engine's settings as resolved at start-up.",
            block_size=str(config.block_size),
            num_blocks=str(config.num_blocks),
            num_host_blocks=str(config.num_host_blocks),
            max_model_len=str(config.max_model_len),
            max_num_seqs=str(config.max_num_seqs),
            max_num_batched_tokens=str(config.max_num_batched_tokens),
            enable_prefix_caching=str(config.enable_prefix_caching).lower(),
            scheduling_policy=config.policy,
        )

    def _add_vllm(self, engine: EngineHandle) -> None:
        """Add the metrics of --metrics-compat vllm."""
        config, registry = engine.config, self._registry
        registry.register(RowCollector(lambda: engine.stats, VLLM_METRICS, model_name=self._model_name, engine="0"))
        if engine.facts.max_loras:
            registry.register(LoraCollector(engine))
        Info("vllm:cache_config", "KV cache settings.", registry=registry).info(
            {
                "engine": "0",
                "block_size": str(config.block_size),
                "num_gpu_blocks": str(config.num_blocks),
                "enable_prefix_caching": str(config.enable_prefix_caching),
            }
        )
        self.listeners.append(VllmEventMetrics(registry, self._model_name, config.max_model_len).observe)

    def _gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        Gauge(name, text, ["model_name"], registry=self._registry).labels(self._model_name).set_function(read)

    def _info(self, name: str, text: str, **labels: str) -> None:
        Info(name, text, ["model_name"], registry=self._registry).labels(self._model_name).info(labels)
