"""The engine's metrics, as rows of a table: name, meaning, and value in Stats.

A metric is one row of metric_rows.json, which reads a field of Stats (engine/core/stats.py) or what is computed here of
several; engine/core/scheduling/stats_recorder.py counts it. The rows of `spans` and `history` read other counts. The help
text is what Prometheus shows; server/telemetry/metrics.py renders rows at each scrape. VLLM_METRICS are the same rows under
vLLM's names; those of `grammars` lack the labels of the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from engine.core.stats import FailureCause, Histogram, Stats

Family = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily
Value = float | Histogram | Mapping[Any, float]


class Kind(Enum):
    GAUGE = GaugeMetricFamily
    COUNTER = CounterMetricFamily
    HISTOGRAM = HistogramMetricFamily


@dataclass(frozen=True, slots=True)
class Metric:
    """One row; with a `label`, its value is a number per label value."""

    kind: Kind
    name: str
    help: str
    source: str  # a field or property of what is counted, or a name of _COMPUTED
    label: str = ""
    vllm: str = ""  # its name there, with --metrics-compat vllm

    def read(self, counts: Any) -> Value:
        """Return the metric's current value."""
        compute = _COMPUTED.get(self.source)
        value: Value = getattr(counts, self.source) if compute is None else compute(counts)
        return value

    def family(self, counts: object, common: Mapping[str, str]) -> Family:
        """Return the metric's current samples, each with the `common` labels."""
        labels = [*common, self.label] if self.label else list(common)
        family: Family = self.kind.value(self.name, self.help, labels=labels)
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


def _cumulative(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Return Prometheus' buckets, (upper bound, observations up to it), and the sum."""
    bounds = [*map(repr, histogram.bounds), "+Inf"]
    counts = list(histogram.counts)  # copied once, so that the buckets agree
    return list(zip(bounds, accumulate(counts), strict=True)), histogram.sum


_COMPUTED: Mapping[str, Callable[[Stats], Value]] = {
    "background": lambda s: {"running": s.num_background_running, "waiting": s.num_background_waiting},
    "blocks": lambda s: {"free": s.blocks_free, "cached": s.blocks_cached, "held": s.blocks_held},
    "host_blocks": lambda s: {"free": s.host_blocks_free, "cached": s.host_blocks_cached, "held": s.host_blocks_held},
    "pinned_blocks": lambda s: {"pool": s.blocks_pinned, "host": s.host_blocks_pinned, **s.store_blocks_pinned},
    "disk_blocks": lambda s: s.store_blocks["disk"],
    "shared_blocks": lambda s: s.store_blocks["shared"],
    "accepted_at": lambda s: dict(enumerate(s.spec_accepted_at)),
    "not_finite": lambda s: s.failed[FailureCause.NOT_FINITE],
    "waiting_or_preempted": lambda s: s.num_waiting + s.num_preempted,
}
ROWS: Mapping[str, tuple[Metric, ...]] = {
    group: tuple(Metric(**{**row, "kind": Kind[row["kind"].upper()]}) for row in rows)
    for group, rows in json.loads(Path(__file__).with_name("metric_rows.json").read_text(encoding="utf-8")).items()
}
METRICS = ROWS["quire"]

# Under vLLM's names, so that dashboards and autoscalers made for it work.
VLLM_METRICS = (*(replace(each, name=each.vllm) for each in METRICS if each.vllm), *ROWS["vllm"])
