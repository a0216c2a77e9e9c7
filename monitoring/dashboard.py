"""Writes dashboards/quire.json, the Grafana dashboard, from the table of panels below.

A dashboard's JSON is mostly layout; here a panel is its question, its unit and its PromQL. After a change run
`python monitoring/dashboard.py`; a test holds the file to this source, and monitoring/verify.py evaluates every query.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PATH = Path(__file__).parent / "dashboards" / "quire.json"
COLUMNS = 24  # of Grafana's grid
ENGINE = 'model_name=~"$model_name", instance=~"$instance"'  # selects the engine's metrics
PROCESS = 'instance=~"$instance"'  # selects the front's and the process's, which know no model
QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))

Queries = tuple[tuple[str, str], ...]  # (legend, PromQL)


class Panel(NamedTuple):
    """One picture. `width` is in grid columns; `extra` goes into its field defaults."""

    title: str
    help: str
    kind: str
    unit: str
    queries: Queries
    width: int = 8
    height: int = 8
    stacked: bool = False
    extra: dict[str, Any] = {}  # noqa: RUF012 - never changed


class Row(NamedTuple):
    title: str
    panels: tuple[Panel, ...]


def rate(metric: str, selector: str = ENGINE) -> str:
    """Increase a second over the window that fits the zoom."""
    return f"rate({metric}{{{selector}}}[$__rate_interval])"


def quantiles(metric: str, by: str = "") -> Queries:
    """The percentiles of a histogram."""
    grouped = f"sum by (le) ({rate(metric + '_bucket', by or ENGINE)})"
    return tuple((name, f"histogram_quantile({quantile}, {grouped})") for name, quantile in QUANTILES)


def mean(metric: str) -> str:
    """The mean of a histogram's observations."""
    return f"sum({rate(metric + '_sum')}) / sum({rate(metric + '_count')})"


def thresholds(*steps: tuple[float | None, str]) -> dict[str, Any]:
    """Colors from a value upwards."""
    return {"thresholds": {"mode": "absolute", "steps": [{"value": value, "color": color} for value, color in steps]}}


def latency(title: str, help_text: str, metric: str, width: int = 8) -> Panel:
    """Percentiles over time."""
    return Panel(title, help_text, "timeseries", "s", quantiles(metric), width)


def heatmap(title: str, help_text: str, metric: str, unit: str = "s", width: int = 8) -> Panel:
    """The whole distribution over time."""
    query = f"sum by (le) (increase({metric}_bucket{{{ENGINE}}}[$__rate_interval]))"
    return Panel(title, help_text, "heatmap", unit, (("{{le}}", query),), width)


ALIVE = thresholds((None, "red"), (1, "green")) | {
    "mappings": [{"type": "value", "options": {"0": {"text": "DOWN"}, "1": {"text": "UP"}}}]
}
SHARE = thresholds((None, "green"), (0.8, "orange"), (0.95, "red")) | {"min": 0, "max": 1}
SLOW = thresholds((None, "green"), (1, "orange"), (5, "red"))


def _stat(title: str, help_text: str, unit: str, query: str, extra: dict[str, Any], kind: str = "stat") -> Panel:
    return Panel(title, help_text, kind, unit, (("", query),), width=3, height=4, extra=extra)


PLAIN = thresholds((None, "blue"))
HIT_TOKENS = f"sum({rate('quire_prefix_cache_hit_tokens_total')})"
QUERIED_TOKENS = f"sum({rate('quire_prefix_cache_queried_tokens_total')})"

ROWS = (
    Row(
        "Overview",
        (
            _stat("Engine", "Whether the engine thread lives.", "none", f"min(quire_engine_alive{{{ENGINE}}})", ALIVE),
            _stat("Running", "Sequences in the batch.", "none", f"sum(quire_num_requests_running{{{ENGINE}}})", PLAIN),
            _stat(
                "Waiting",
                "Requests not yet scheduled, and preempted ones.",
                "none",
                f"sum(quire_num_requests_waiting{{{ENGINE}}}) + sum(quire_num_requests_preempted{{{ENGINE}}})",
                thresholds((None, "green"), (1, "orange"), (100, "red")),
            ),
            _stat(
                "Output", "Generated tokens a second.", "none", f"sum({rate('quire_generation_tokens_total')})", PLAIN
            ),
            _stat(
                "KV pool",
                "Share of the pool that live sequences hold.",
                "percentunit",
                f"max(quire_kv_cache_usage_ratio{{{ENGINE}}})",
                SHARE,
                "gauge",
            ),
            _stat("TTFT p99", "Time to first token.", "s", quantiles("quire_time_to_first_token_seconds")[2][1], SLOW),
            _stat("ITL p99", "Gap between tokens.", "s", quantiles("quire_inter_token_latency_seconds")[2][1], SLOW),
            _stat(
                "Refused",
                "Requests a second refused because the queue was full.",
                "reqps",
                f"sum({rate('quire_requests_rejected_total')})",
                thresholds((None, "green"), (0.01, "red")),
            ),
        ),
    ),
    Row(
        "Latency",
        (
            latency("Time to first token", "Arrival until the first token.", "quire_time_to_first_token_seconds"),
            latency("Inter-token latency", "Every gap between two tokens.", "quire_inter_token_latency_seconds"),
            latency(
                "Time per output token", "A request's mean after the first.", "quire_time_per_output_token_seconds"
            ),
            heatmap("Time to first token", "All requests, not only percentiles.", "quire_time_to_first_token_seconds"),
            heatmap("Inter-token latency", "All gaps, not only percentiles.", "quire_inter_token_latency_seconds"),
            latency("End to end", "Arrival until the last token.", "quire_e2e_request_latency_seconds"),
            Panel(
                "Where a request's time goes",
                "Mean seconds of a request in each phase.",
                "timeseries",
                "s",
                (
                    ("queue", mean("quire_request_queue_time_seconds")),
                    ("prefill", mean("quire_request_prefill_time_seconds")),
                    ("decode", mean("quire_request_decode_time_seconds")),
                ),
                width=12,
                stacked=True,
            ),
            latency("Time in the queue", "Arrival until first scheduled.", "quire_request_queue_time_seconds", 12),
        ),
    ),
    Row(
        "Throughput",
        (
            Panel(
                "Tokens a second",
                "Prompt tokens whose prefill completed, tokens generated.",
                "timeseries",
                "none",
                (
                    ("prompt", f"sum({rate('quire_prompt_tokens_total')})"),
                    ("generated", f"sum({rate('quire_generation_tokens_total')})"),
                ),
            ),
            Panel(
                "Sequences",
                "In the batch, waiting for the first time, waiting to resume.",
                "timeseries",
                "none",
                tuple(
                    (state, f"sum(quire_num_requests_{state}{{{ENGINE}}})")
                    for state in ("running", "waiting", "preempted")
                ),
                stacked=True,
            ),
            Panel(
                "Answers by finish reason",
                "Sequences ended a second.",
                "timeseries",
                "ops",
                (("{{reason}}", f"sum by (reason) ({rate('quire_requests_finished_total')})"),),
                stacked=True,
            ),
            heatmap("Prompt lengths", "Of finished requests, tokens.", "quire_request_prompt_tokens", "none"),
            heatmap("Answer lengths", "Of finished requests, tokens.", "quire_request_generation_tokens", "none"),
            heatmap("Mispredicted lengths", "By sjf, in tokens.", "quire_predicted_length_error_tokens", "none"),
            Panel(
                "Prompt tokens that wait",
                "Still to be computed of all that wait: the backlog.",
                "timeseries",
                "none",
                (("tokens", f"sum(quire_num_waiting_tokens{{{ENGINE}}})"),),
            ),
        ),
    ),
    Row(
        "KV memory",
        (
            Panel(
                "KV blocks by state",
                "Held by sequences, cached for reuse, free.",
                "timeseries",
                "none",
                (("{{state}}", f"sum by (state) (quire_kv_blocks{{{ENGINE}}})"),),
                stacked=True,
            ),
            Panel(
                "Prefix cache hit ratio",
                "Prompt tokens that did not have to be computed, of all looked up.",
                "timeseries",
                "percentunit",
                (("hit ratio", f"{HIT_TOKENS} / {QUERIED_TOKENS}"),),
                extra={"min": 0, "max": 1},
            ),
            Panel(
                "Preemptions",
                "Sequences a second pushed out because the pool was exhausted; swapped to host memory, or computed again.",
                "timeseries",
                "ops",
                (("{{kind}}", f"sum by (kind) ({rate('quire_preemptions_total')})"),),
                stacked=True,
            ),
        ),
    ),
    Row(
        "Engine",
        (
            latency("Step duration", "One forward pass, plan to commit.", "quire_step_duration_seconds"),
            Panel(
                "Batch",
                "Mean tokens and sequences in a step.",
                "timeseries",
                "none",
                (("tokens", mean("quire_step_tokens")), ("sequences", mean("quire_step_sequences"))),
            ),
            Panel(
                "Steps",
                "Forward passes a second.",
                "timeseries",
                "ops",
                (("steps", f"sum({rate('quire_engine_steps_total')})"),),
            ),
        ),
    ),
    Row(
        "Front and health",
        (
            Panel(
                "HTTP requests",
                "Answers a second by route and status.",
                "timeseries",
                "reqps",
                (("{{route}} {{status}}", f"sum by (route, status) ({rate('quire_http_requests_total', PROCESS)})"),),
            ),
            Panel(
                "Aborts",
                "Sequences a second ended early, by cause.",
                "timeseries",
                "ops",
                (("{{cause}}", f"sum by (cause) ({rate('quire_requests_aborted_total')})"),),
            ),
            Panel(
                "Unknown request fields",
                "Fields that clients send and nobody reads.",
                "timeseries",
                "ops",
                (("{{field}}", f"sum by (field) ({rate('quire_ignored_fields_total', PROCESS)})"),),
            ),
            Panel(
                "Seconds since the last step",
                "0 when idle; growing means that the engine hangs.",
                "timeseries",
                "s",
                (("{{instance}}", f"quire_engine_seconds_since_step{{{ENGINE}}}"),),
            ),
            Panel(
                "Event loop lag",
                "Longest time in the last minute that no stream or probe was served.",
                "timeseries",
                "s",
                (("{{instance}}", f"quire_event_loop_lag_seconds{{{PROCESS}}}"),),
            ),
            Panel(
                "Process memory",
                "Resident memory of the daemon.",
                "timeseries",
                "bytes",
                (("{{instance}}", f'process_resident_memory_bytes{{job="quire", {PROCESS}}}'),),
            ),
            Panel(
                "Process CPU",
                "Cores in use.",
                "timeseries",
                "none",
                (("{{instance}}", rate("process_cpu_seconds_total", f'job="quire", {PROCESS}')),),
            ),
            Panel(
                "Grammars for structured outputs",
                "Time to compile one that is not kept already.",
                "timeseries",
                "s",
                quantiles("quire_grammar_compile_seconds", PROCESS),
            ),
        ),
    ),
)


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "timeseries":
        return {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}
    if panel.kind == "heatmap":
        return {
            "calculate": False,
            "cellGap": 1,
            "color": {"mode": "scheme", "scheme": "Turbo", "steps": 64},
            "yAxis": {"unit": panel.unit},
            "tooltip": {"mode": "single", "yHistogram": True},
        }
    return {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}


def _custom(panel: Panel) -> dict[str, Any]:
    if panel.kind != "timeseries":
        return {}
    stacking = {"mode": "normal"} if panel.stacked else {"mode": "none"}
    return {
        "custom": {
            "fillOpacity": 40 if panel.stacked else 8,
            "lineWidth": 1,
            "showPoints": "never",
            "stacking": stacking,
        }
    }


def _panel(panel: Panel, panel_id: int, x: int, y: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    form = {"format": "heatmap"} if panel.kind == "heatmap" else {}
    return {
        "id": panel_id,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": source,
        "gridPos": {"h": panel.height, "w": panel.width, "x": x, "y": y},
        "fieldConfig": {"defaults": {"unit": panel.unit, **_custom(panel), **panel.extra}, "overrides": []},
        "options": _options(panel),
        "targets": [
            {"refId": chr(65 + index), "datasource": source, "expr": expr, "legendFormat": legend, **form}
            for index, (legend, expr) in enumerate(panel.queries)
        ],
    }


def _laid_out() -> Iterator[dict[str, Any]]:
    """Rows from the top, panels from the left, a new line when one is full."""
    y, panel_id = 0, 1
    for row in ROWS:
        yield {"id": panel_id, "type": "row", "title": row.title, "collapsed": False, "panels": [],
               "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": y}}  # fmt: skip
        x, y, panel_id = 0, y + 1, panel_id + 1
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y = 0, y + panel.height
            yield _panel(panel, panel_id, x, y)
            x, panel_id = x + panel.width, panel_id + 1
        y += row.panels[-1].height


def _variable(name: str, query: str, label: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    }


def build() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    return {
        "uid": "quire",
        "title": "Quire",
        "description": "An LLM serving daemon: what its users feel, what it does, what it has left.",
        "tags": ["quire", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
                _variable("model_name", "label_values(quire_build_info, model_name)", "Model"),
                _variable(
                    "instance", 'label_values(quire_build_info{model_name=~"$model_name"}, instance)', "Instance"
                ),
            ]
        },
        "panels": list(_laid_out()),
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps(build(), indent=2) + "\n", encoding="utf-8")
