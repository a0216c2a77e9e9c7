"""The page of metrics, from the registry that /metrics renders."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric as Family

from engine.core.config import SchedulerConfig
from engine.core.scheduling.scheduler import Scheduler
from engine.handle import EngineFacts
from engine.loop import Engine
from engine.text.chat.history import HistoryCounts
from loadtest.fake_runner import FakeRunner
from server.answers.models import Models
from server.settings.app_config import AppConfig
from server.telemetry.metrics import LoraCollector, Metrics, RowCollector
from server.telemetry.otlp import SpanCounts
from tests.reference.tables import MADE, cell, table

_HEAD = f"""# Metrics

{MADE}

`GET /metrics` is Prometheus text. A histogram has `_bucket`, `_sum` and `_count`; its name ends in its unit. Times start when the
request has arrived. TTFT is the time to the first token; TPOT a request's mean time per token after the first.
"""
_SUFFIXES = {"counter": "_total", "info": "_info"}

Row = tuple[str, str, str, str]


def metrics_page() -> str:
    """Return the page."""
    config = SchedulerConfig(num_blocks=8, block_size=4, max_model_len=16, max_num_seqs=1, max_num_batched_tokens=16)
    engine = Engine(Scheduler(config), FakeRunner(config), EngineFacts(16))
    metrics = Metrics(compat_vllm=True).add_model("MODEL", engine, HistoryCounts())
    metrics.add_rows("spans", SpanCounts())
    metrics.add_rows("models", Models(AppConfig(model="", served_model_names=("MODEL",))))
    rows = list(dict.fromkeys(_rows(metrics)))
    heads = ("metric", "type", "labels", "meaning")
    lines = [_HEAD]
    for title, prefix in (("Quire's names", "quire_"), ("OpenTelemetry's names", "gen_ai_")):
        own = [row for row in rows if row[0].startswith(f"`{prefix}")]
        if own:
            lines += [f"## {title}\n", *table(heads, own)]
    lines += [
        "## vLLM's names\n",
        "With `--metrics-compat vllm`, so that dashboards and autoscalers made for vLLM work.\n",
    ]
    lines += table(heads, [row for row in rows if row[0].startswith("`vllm:")])
    lines.append(
        "The process, its memory and Python are described by the metrics of Prometheus' client: `process_*`, `python_*`.\n"
    )
    return "\n".join(lines)


def _rows(metrics: Metrics) -> Iterator[Row]:
    models = metrics._models.models.values()
    for collector in [each for one in (*models, metrics) for each in one.registry._collector_to_names]:
        if isinstance(collector, RowCollector):
            for metric, family in zip(collector.rows, collector.collect(), strict=True):
                yield _row(family, list(metric.labels))
        elif isinstance(collector, MetricWrapperBase):
            labels = [label for label in collector._labelnames if label not in ("model_name", "engine")]
            for family in collector.describe():
                yield _row(family, labels)
        elif isinstance(collector, LoraCollector):
            for family in collector.collect():
                yield _row(family, list(family.samples[0].labels))


def _row(family: Family, labels: list[str]) -> Row:
    suffix = _SUFFIXES.get(family.type, "")
    name = family.name if family.name.endswith(suffix) else family.name + suffix
    return f"`{name}`", family.type, ", ".join(f"`{label}`" for label in labels), cell(family.documentation)
