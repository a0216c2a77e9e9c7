"""Exports metrics to Prometheus: the engine's statistics and event counts.

The engine counts in plain numbers (engine/core/stats.py) and never calls Prometheus; a scrape turns them into text on the
event loop thread. Prometheus counts what becomes of events itself (event_metrics.py).

A metric of the engine is one row of metric_rows.json, which reads a field of Stats or what is computed here of several;
engine/core/scheduling/stats_recorder.py counts it. The rows of `spans` and `history` read other counts, those of `events` have
none. VLLM_METRICS are the same rows under vLLM's names.

Each model has a registry of its engine's metrics, which is here while the model is loaded; all have its name as a label.

Code that blocks the event loop delays every stream, probe and scrape, so a timer measures four times a second how late the loop
is. The worst recent lag is reported, so that a scrape finds a stall that is over. A stall shorter than PERIOD_S may be missed,
or seen in part.
"""

from __future__ import annotations

import asyncio
import json
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import prometheus_client
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    GCCollector,
    Info,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from engine.core.stats import REQUEST_BUCKETS_S, FailureCause, Histogram
from engine.handle import EngineHandle
from engine.system.version import VERSION
from server.telemetry.event_metrics import EventMetrics, VllmEventMetrics
from server.telemetry.events import Event, Listener, RequestEnded

PERIOD_S = 0.25
WINDOW_S = 45.0  # a scrape interval is shorter


class LoopLag:
    """Samples the running loop; `seconds` is the worst recent lag."""

    def __init__(self) -> None:
        self._lags: deque[float] = deque(maxlen=round(WINDOW_S / PERIOD_S))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start sampling the running loop."""
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(PERIOD_S, self._sample)

    def stop(self) -> None:
        """Stop sampling. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def seconds(self) -> float:
        """Return the worst recent lag; a timer that is overdue now counts, too."""
        return max(0.0, *self._lags, self._overdue_s())

    def _sample(self) -> None:
        self._lags.append(self._overdue_s())
        self.start()

    def _overdue_s(self) -> float:
        return 0.0 if self._loop is None or self._timer is None else self._loop.time() - self._timer.when()


Family = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily
Value = float | Histogram | Mapping[Any, float]


class Kind(Enum):
    GAUGE = GaugeMetricFamily
    COUNTER = CounterMetricFamily
    HISTOGRAM = HistogramMetricFamily


@dataclass(frozen=True, slots=True)
class Metric:
    """One row; with a label, its value is a number per label value. What counts events has no source."""

    kind: Kind
    name: str
    help: str
    source: str = ""  # a field or property of what is counted, or a name of _COMPUTED
    labels: tuple[str, ...] = ()
    vllm: str = ""  # its name there, with --metrics-compat vllm

    def read(self, counts: Any) -> Value:
        """Return the metric's current value."""
        compute = _COMPUTED.get(self.source)
        value: Value = getattr(counts, self.source) if compute is None else compute(counts)
        return value

    def family(self, counts: object, common: Mapping[str, str]) -> Family:
        """Return the metric's current samples, each with the `common` labels."""
        family: Family = self.kind.value(self.name, self.help, labels=[*common, *self.labels])
        value = self.read(counts)
        own = tuple(common.values())
        if isinstance(family, HistogramMetricFamily):
            assert isinstance(value, Histogram)
            family.add_metric(own, *_cumulative(value))
        elif isinstance(value, Mapping):
            for key, number in value.items():
                family.add_metric((*own, str(key.value if isinstance(key, Enum) else key)), number)
        else:
            assert not isinstance(value, Histogram)
            family.add_metric(own, value)
        return family

    def counting(self, registry: CollectorRegistry) -> MetricWrapperBase:
        """Return a metric that counts events from now on."""
        counting: MetricWrapperBase = _COUNTING[self.kind](self.name, self.help, self.labels, registry=registry)
        return counting


_COUNTING: Mapping[Kind, Callable[..., MetricWrapperBase]] = {
    Kind.GAUGE: prometheus_client.Gauge,
    Kind.COUNTER: prometheus_client.Counter,
    Kind.HISTOGRAM: partial(prometheus_client.Histogram, buckets=REQUEST_BUCKETS_S),
}


def _cumulative(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Return Prometheus' buckets, (upper bound, observations up to it), and the sum."""
    bounds = [*map(repr, histogram.bounds), "+Inf"]
    counts = list(histogram.counts)  # copied once, so that the buckets agree
    return list(zip(bounds, accumulate(counts), strict=True)), histogram.sum


_COMPUTED: Mapping[str, Callable[[Any], Value]] = {
    "alive": lambda engine: engine.health().alive,
    "busy": lambda engine: engine.health().busy,
    "seconds_since_step": lambda engine: engine.health().seconds_since_step,
    "adapters": lambda engine: len(engine.adapters),
    "background": lambda s: {"running": s.num_background_running, "waiting": s.num_background_waiting},
    "blocks": lambda s: {"free": s.blocks_free, "cached": s.blocks_cached, "held": s.blocks_held},
    "host_blocks": lambda s: {"free": s.host_blocks_free, "cached": s.host_blocks_cached, "held": s.host_blocks_held},
    "pinned_blocks": lambda s: {"pool": s.blocks_pinned, "host": s.host_blocks_pinned, **s.store_blocks_pinned},
    "disk_blocks": lambda s: s.store_blocks["disk"],
    "shared_blocks": lambda s: s.store_blocks["shared"],
    "accepted_at": lambda s: dict(enumerate(s.spec_accepted_at)),
    "not_finite": lambda s: s.failed[FailureCause.NOT_FINITE],
    "models_loaded": lambda models: {each.name: each.parts is not None for each in models.entries},
    "models_failed": lambda models: {each.name: bool(each.reason) for each in models.entries},
    "model_loads": lambda models: {each.name: each.num_loads for each in models.entries},
    "waiting_or_preempted": lambda s: s.num_waiting + s.num_preempted,
}
ROWS: Mapping[str, tuple[Metric, ...]] = {
    group: tuple(Metric(**{**row, "kind": Kind[row["kind"].upper()]}) for row in rows)
    for group, rows in json.loads(Path(__file__).with_name("metric_rows.json").read_text(encoding="utf-8")).items()
}
METRICS = ROWS["quire"]

# Under vLLM's names, so that dashboards and autoscalers made for it work.
VLLM_METRICS = (*(replace(each, name=each.vllm) for each in METRICS if each.vllm), *ROWS["vllm"])


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


class ModelCollector(Collector):
    """The metrics of all models, each family once."""

    def __init__(self) -> None:
        self.models: dict[str, ModelMetrics] = {}

    def collect(self) -> Iterator[Any]:
        families: dict[str, Any] = {}
        for model in list(self.models.values()):
            for family in model.registry.collect():
                if (first := families.setdefault(family.name, family)) is not family:
                    first.samples += family.samples
        yield from families.values()

    def observe(self, event: Event) -> None:
        """Count an event of a model. Any thread."""
        if isinstance(event, RequestEnded) and (model := self.models.get(event.record.model)) is not None:
            model.observe(event)


class Metrics:
    """Everything that /metrics shows; `listeners` count events. Event loop."""

    def __init__(self, *, compat_vllm: bool) -> None:
        self.registry, self._compat_vllm = CollectorRegistry(), compat_vllm
        self._models = ModelCollector()
        self.loop_lag = LoopLag()
        self.add_rows("event_loop", self.loop_lag)
        self.registry.register(self._models)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        events = {row.name: row.counting(self.registry) for row in ROWS["events"]}
        self.listeners: list[Listener] = [EventMetrics(events).observe]  # any thread
        if compat_vllm:
            self.listeners.append(self._models.observe)

    def render(self) -> tuple[bytes, str]:
        """Return the exposition and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def add_rows(self, group: str, counts: object) -> None:
        """Export a group of rows, such as what became of spans; they do not exist where nothing counts them."""
        self.registry.register(RowCollector(lambda: counts, ROWS[group]))

    def add_model(self, name: str, engine: EngineHandle, history: object | None = None) -> Metrics:
        """Export the metrics of a model, with the counts of its `history` if it has one, until it is removed."""
        self._models.models[name] = ModelMetrics(name, engine, history, compat_vllm=self._compat_vllm)
        return self

    def remove_model(self, name: str) -> None:
        """Forget the metrics of a model."""
        del self._models.models[name]


class ModelMetrics:
    """The metrics of one model."""

    def __init__(self, name: str, engine: EngineHandle, history: object | None, *, compat_vllm: bool) -> None:
        self.registry, self._model_name = CollectorRegistry(), name
        self.observe: Listener = lambda _: None
        self.registry.register(RowCollector(lambda: engine.stats, METRICS, model_name=name))
        self.registry.register(RowCollector(lambda: engine, ROWS["engine"], model_name=name))
        if history is not None:
            self.registry.register(RowCollector(lambda: history, ROWS["history"], model_name=name))
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
        if compat_vllm:
            self._add_vllm(engine)

    def _add_vllm(self, engine: EngineHandle) -> None:
        """Add the metrics of --metrics-compat vllm."""
        config, registry = engine.config, self.registry
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
        self.observe = VllmEventMetrics(registry, self._model_name, config.max_model_len).observe

    def _info(self, name: str, text: str, **labels: str) -> None:
        Info(name, text, ["model_name"], registry=self.registry).labels(self._model_name).info(labels)
