"""Describes the Grafana dashboard, and writes it: python monitoring/dashboard.py > monitoring/dashboards/quire.json.

A panel is one line below: a title, its description, PromQL and a unit. In PromQL here, a Quire metric is written without the
labels that the dashboard's variables choose, and [R] is the interval of rates; `_full` adds both. WITHOUT_PANEL names the
metrics that no panel shows, with the reason. tests/pure/test_monitoring.py compares the file, and that nothing is missing.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

# By the beginning of the metric's name.
WITHOUT_PANEL = {
    "python_": "the interpreter's garbage collector and version, of use only in a search for a leak",
    "process_": "the process; its memory, CPU and files have panels, its start time and virtual memory say nothing as a graph",
}

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_METRIC = re.compile(r"\b(quire_\w+|process_\w+)(?:\{([^}]*)\})?")
# Metrics of HTTP requests are counted for all models together; those of the engine carry the model's name.
_OF_THE_FRONT = re.compile(r"quire_(http|grammar|ignored|lora_requests|handoffs|tenant|event_loop|trace)_|process_")


class Query(NamedTuple):
    """PromQL and how its series are called."""

    expr: str
    legend: str = ""


class Step(NamedTuple):
    """A threshold: from this value on, this colour. The first step of a panel has no value."""

    value: float | None
    color: str


CALM = (Step(None, "blue"),)


def _full(expr: str) -> str:
    """Return PromQL with the dashboard's variables."""

    def choose(found: re.Match[str]) -> str:
        name, given = found.groups()
        labels = [] if _OF_THE_FRONT.match(name) else ['model_name=~"$model_name"']
        labels.append('instance=~"$instance"')
        if name.startswith("quire_tenant_"):
            labels.append('tenant=~"$tenant"')
        if name.startswith("process_"):
            labels.append('job="quire"')
        return f"{name}{{{', '.join([*labels, *([given] if given else [])])}}}"

    return _METRIC.sub(choose, expr).replace("[R]", "[$__rate_interval]")


def up_to(*steps: float | str) -> tuple[Step, ...]:
    """Return thresholds: up_to("green", 1, "red") is green below 1 and red from there."""
    colors, values = steps[::2], (None, *steps[1::2])
    return tuple(Step(value, str(color)) for value, color in zip(values, colors, strict=True))  # type: ignore[arg-type]


def _panel(
    kind: str,
    title: str,
    about: str,
    queries: Sequence[Query],
    unit: str,
    size: tuple[int, int],
    steps: Sequence[Step] = (),
    **more: Any,
) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": unit}
    if steps:
        defaults["thresholds"] = {"mode": "absolute", "steps": [step._asdict() for step in steps]}
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": SOURCE,
            "expr": _full(query.expr),
            "legendFormat": query.legend or "__auto",
        }
        for index, query in enumerate(queries)
    ]
    panel = {
        "type": kind,
        "title": title,
        "description": about,
        "datasource": SOURCE,
        "gridPos": {"w": size[0], "h": size[1]},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": targets,
    }
    return panel | more


def row(title: str) -> dict[str, Any]:
    """Return a heading; the panels up to the next one belong to it."""
    return {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": {"w": 24, "h": 1}}


def stat(title: str, about: str, expr: str, unit: str, steps: Sequence[Step] = CALM, **names: str) -> dict[str, Any]:
    """Return one number, coloured by its thresholds; `names` replace values, as in _0="DOWN"."""
    options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}
    panel = _panel("stat", title, about, [Query(expr)], unit, (3, 4), steps, options=options)
    if names:
        values = {value.removeprefix("_"): {"text": text} for value, text in names.items()}
        panel["fieldConfig"]["defaults"]["mappings"] = [{"type": "value", "options": values}]
    return panel


def lines(
    title: str, about: str, queries: Sequence[Query], unit: str, steps: Sequence[Step] = (), *, stacked: bool = False
) -> dict[str, Any]:
    """Return a graph; thresholds are dashed lines."""
    options = {
        "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    panel = _panel("timeseries", title, about, queries, unit, (8, 8), steps, options=options)
    panel["fieldConfig"]["defaults"] |= {
        "min": 0,
        "custom": {
            "fillOpacity": 30 if stacked else 8,
            "lineWidth": 1,
            "showPoints": "never",
            "stacking": {"mode": "normal" if stacked else "none"},
            "thresholdsStyle": {"mode": "dashed" if steps else "off"},
        },
    }
    return panel


def quantiles(title: str, about: str, metric: str, unit: str = "s", steps: Sequence[Step] = ()) -> dict[str, Any]:
    """Return a graph of a histogram's p50, p90 and p99."""
    queries = [
        Query(f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket[R])))", f"p{q * 100:.0f}")
        for q in (0.5, 0.9, 0.99)
    ]
    return lines(title, about, queries, unit, steps)


def heatmap(title: str, about: str, metric: str, unit: str) -> dict[str, Any]:
    """Return the distribution of a histogram over time."""
    options = {
        "calculate": False,
        "cellGap": 1,
        "color": {
            "mode": "scheme",
            "scheme": "Turbo",
            "steps": 64,
            "reverse": False,
            "exponent": 0.5,
            "fill": "dark-orange",
        },
        "yAxis": {"unit": unit},
        "tooltip": {"mode": "single", "yHistogram": True, "showColorScale": False},
    }
    queries = [Query(f"sum by (le) (increase({metric}_bucket[R]))", "{{le}}")]
    panel = _panel("heatmap", title, about, queries, unit, (8, 8), options=options)
    panel["targets"][0]["format"] = "heatmap"
    return panel


def gauge(title: str, about: str, expr: str, steps: Sequence[Step]) -> dict[str, Any]:
    """Return a share from 0 to 1."""
    options = {"reduceOptions": {"calcs": ["lastNotNull"]}}
    panel = _panel("gauge", title, about, [Query(expr)], "percentunit", (3, 4), steps, options=options)
    panel["fieldConfig"]["defaults"] |= {"min": 0, "max": 1}
    return panel


def table(title: str, about: str, exprs: Sequence[str], hidden: Sequence[str]) -> dict[str, Any]:
    """Return the labels of series, one row each."""
    panel = _panel("table", title, about, [Query(expr) for expr in exprs], "none", (24, 6))
    for target in panel["targets"]:
        target |= {"format": "table", "instant": True}
    panel["transformations"] = [
        {"id": "merge", "options": {}},
        {"id": "organize", "options": {"excludeByName": dict.fromkeys(hidden, True)}},
    ]
    return panel


def _mean(metric: str, legend: str) -> Query:
    return Query(f"sum(rate({metric}_sum[R])) / sum(rate({metric}_count[R]))", legend)


def _by(label: str, metric: str, *, rate: bool = True) -> list[Query]:
    """Return a query for one series per value of a label."""
    return [Query(f"sum by ({label}) ({f'rate({metric}[R])' if rate else metric})", f"{{{{{label}}}}}")]


def _rate(metric: str, legend: str) -> Query:
    return Query(f"sum(rate({metric}[R]))", legend)


TTFT = "quire_time_to_first_token_seconds"
ITL = "quire_inter_token_latency_seconds"

PANELS = [
    row("Overview"),
    stat("Engine", "UP while the engine thread of every instance runs.", "min(quire_engine_alive)", "none",
         up_to("red", 1, "green"), _0="DOWN", _1="UP"),
    stat("Running", "Sequences in the batch.", "sum(quire_num_requests_running)", "none"),
    stat("Waiting", "Requests not yet scheduled, and preempted ones.",
         "sum(quire_num_requests_waiting) + sum(quire_num_requests_preempted)", "none",
         up_to("green", 1, "orange", 100, "red")),
    stat("Output", "Generated tokens a second.", "sum(rate(quire_generation_tokens_total[R]))", "none"),
    gauge("KV pool", "Share of the pool that live sequences hold. Near 100 % requests wait or are preempted.",
          "max(quire_kv_cache_usage_ratio)", up_to("green", 0.8, "orange", 0.95, "red")),
    stat("TTFT p99", "Time to first token: 99 of 100 requests have theirs within this.",
         f"histogram_quantile(0.99, sum by (le) (rate({TTFT}_bucket[R])))", "s", up_to("green", 1, "orange", 2.5, "red")),
    stat("ITL p99", "Inter-token latency: 99 of 100 gaps between tokens are shorter.",
         f"histogram_quantile(0.99, sum by (le) (rate({ITL}_bucket[R])))", "s", up_to("green", 0.1, "orange", 0.5, "red")),
    stat("Refused", "Requests a second that met a full queue and got a 429.", "sum(rate(quire_requests_rejected_total[R]))",
         "reqps", up_to("green", 0.001, "red")),

    row("Objectives and goodput"),
    lines("Error budget burnt by slow first tokens",
          "How many times faster than allowed the budget is used: 1 uses it up in the objective's period. The alerts fire at "
          "14.4 (5 m and 1 h) and 6 (30 m and 6 h). From the recording rules in alerts.yml.",
          [Query(f'max(quire:ttft_slow:ratio_rate{w}{{instance=~"$instance"}}) / 0.01', w) for w in ("5m", "30m", "1h", "6h")],
          "none", up_to("green", 6, "orange", 14.4, "red")),
    lines("Error budget burnt by failures",
          "The same for requests that failed: the larger of HTTP answers of 500 and above, and sequences that ended on an error.",
          [Query(f'max(quire:errors:ratio_rate{w}{{instance=~"$instance"}}) / 0.001', w) for w in ("5m", "30m", "1h", "6h")],
          "none", up_to("green", 6, "orange", 14.4, "red")),
    lines("Goodput", "Share of answers with a target or a deadline that met all of theirs. Empty while no request has any: "
          "set --target-ttft-ms, --target-itl-ms, or deadline_ms in requests.",
          [Query("sum(rate(quire_requests_met_targets_total[R])) / sum(rate(quire_requests_targeted_total[R]))", "met")],
          "percentunit", up_to("red", 0.95, "orange", 0.99, "green")),
    lines("Missed targets", "Answers a second that missed a target, by target.",
          _by("target", "quire_requests_missed_targets_total"), "ops"),
    lines("Dropped requests", "Requests a second that were not computed because they could not be in time (408).",
          _by("reason", "quire_requests_dropped_total"), "ops"),

    row("Latency"),
    quantiles("Time to first token", "TTFT: arrival until the first token; the wait and the prefill.", TTFT,
              steps=up_to("green", 2.5, "red")),
    quantiles("Inter-token latency", "ITL: every gap between two tokens of a sequence; what a reader sees as stutter.", ITL),
    quantiles("Time per output token", "TPOT: a request's mean gap, so one long gap among many short ones hardly shows.",
              "quire_time_per_output_token_seconds"),
    heatmap("Time to first token, distribution", "All requests. Two bands mean two kinds of requests.", TTFT, "s"),
    heatmap("Inter-token latency, distribution", "All gaps. A second, higher band is prompts that share steps with decoding.",
            ITL, "s"),
    quantiles("End to end", "Arrival until the last token.", "quire_e2e_request_latency_seconds"),
    lines("Where a request's time goes", "Mean seconds of each part.",
          [_mean(f"quire_request_{part}_time_seconds", part) for part in ("queue", "prefill", "decode")], "s", stacked=True),
    quantiles("Time in the queue", "Arrival until first scheduled.", "quire_request_queue_time_seconds",
              steps=up_to("green", 10, "red")),
    quantiles("Prefill", "First scheduled until the first token.", "quire_request_prefill_time_seconds"),
    quantiles("Decode", "First token until the last.", "quire_request_decode_time_seconds"),

    row("Throughput"),
    lines("Tokens a second", "Prompt tokens are counted when a prefill is complete. The engine's own rate leaves idle time out.",
          [_rate("quire_prompt_tokens_total", "prompt"), _rate("quire_generation_tokens_total", "generated"),
           Query("sum(quire_tokens_per_second)", "computed while busy")], "none"),
    lines("Sequences", "By state. Preempted ones wait to resume.",
          [Query(f"sum(quire_num_requests_{state})", state) for state in ("running", "waiting", "preempted")], "none"),
    lines("Answers by finish reason", "Sequences that ended, a second.", _by("reason", "quire_requests_finished_total"), "ops"),
    heatmap("Prompt lengths", "Tokens of the prompts of ended sequences.", "quire_request_prompt_tokens", "none"),
    heatmap("Answer lengths", "Tokens that ended sequences generated.", "quire_request_generation_tokens", "none"),
    heatmap("Mispredicted lengths", "Error of sjf's prediction of an answer's length, in tokens; empty under other policies.",
            "quire_predicted_length_error_tokens", "none"),
    lines("Prompt tokens that wait", "Tokens of waiting requests that are not computed yet.",
          [Query("sum(quire_num_waiting_tokens)", "tokens")], "none"),
    lines("Refused requests", "Answered with 429 because the queue was full, a second.",
          [_rate("quire_requests_rejected_total", "refused")], "reqps"),
    lines("Work of batches", "Sequences of /v1/batches by state, and the share of steps that were theirs alone.",
          [*_by("state", "quire_num_requests_background", rate=False),
           Query("sum(rate(quire_background_steps_total[R])) / sum(rate(quire_engine_steps_total[R]))", "share of steps")],
          "none"),

    row("KV memory"),
    lines("KV blocks by state", "Held by sequences, cached for reuse, free. A cached block is reused when a sequence needs one.",
          _by("state", "quire_kv_blocks", rate=False), "none", stacked=True),
    lines("KV pool in use", "Share that live sequences hold, of each instance.",
          [Query("quire_kv_cache_usage_ratio", "{{instance}}")], "percentunit", up_to("green", 0.95, "red")),
    lines("Preemptions", "Sequences that gave their blocks back, a second, by how their K/V is restored.",
          [*_by("kind", "quire_preemptions_total"), _rate("quire_fairness_preemptions_total", "for another tenant")], "ops",
          up_to("green", 1, "red")),
    lines("Block waste", "Share of block slots that stayed empty in sequences that ended; smaller blocks waste less.",
          [Query("quire_kv_block_waste_ratio", "{{instance}}")], "percentunit"),

    row("Prefix cache and its tiers"),
    lines("Prefix cache hit ratio", "Share of prompt tokens that were found and not computed.",
          [Query("sum(rate(quire_prefix_cache_hit_tokens_total[R])) / sum(rate(quire_prefix_cache_queried_tokens_total[R]))",
                 "hit ratio")], "percentunit"),
    lines("Hits by tier", "Prompt tokens found a second: in the KV pool, in host memory, on the disk, in other daemons' part of it.",
          _by("tier", "quire_prefix_cache_tier_hit_tokens_total"), "none", stacked=True),
    lines("Host memory", "Blocks by state; all 0 without --swap-space and --kv-offload-config.",
          _by("state", "quire_swap_blocks", rate=False), "none", stacked=True),
    lines("Copies to and from host memory", "Blocks a second, and steps that were rolled back because a copy failed.",
          [*_by("direction", "quire_swapped_blocks_total"), _rate("quire_swap_failures_total", "failed steps")], "ops"),
    lines("Disk tier", "Cached blocks on the disk; 0 without --kv-offload-config.",
          [Query("sum(quire_kv_offload_disk_blocks)", "blocks"),
           Query("sum(quire_kv_offload_shared_blocks)", "blocks of other daemons in the folder")], "none"),
    lines("Transfers of the disk tier", "Blocks a second that were fetched and stored, and those that failed.",
          [*_by("direction", "quire_kv_offload_blocks_total"),
           Query("sum by (direction) (rate(quire_kv_offload_failures_total[R]))", "{{direction}} failed")], "ops"),
    lines("Pinned prefixes", "Blocks that requests or --pinned-prefixes keep cached, by tier, and blocks that found no place.",
          [*_by("tier", "quire_pinned_blocks", rate=False), _rate("quire_pins_refused_total", "refused a second")], "none"),
    lines("Hand-overs", "Prompts of a decode daemon, by whether their K/V came from its prefill daemon.",
          _by("outcome", "quire_handoffs_total"), "ops"),

    row("Speculation"),
    lines("Accepted drafts", "Share of drafted tokens that were accepted; below a third speculation hardly pays.",
          [Query("sum(rate(quire_spec_decode_num_accepted_tokens_total[R])) "
                 "/ sum(rate(quire_spec_decode_num_draft_tokens_total[R]))", "accepted")], "percentunit"),
    lines("Drafted tokens", "Tokens a second, and drafts. All 0 without --speculative-config.",
          [_rate("quire_spec_decode_num_draft_tokens_total", "drafted"),
           _rate("quire_spec_decode_num_accepted_tokens_total", "accepted"),
           _rate("quire_spec_decode_num_drafts_total", "drafts")], "ops"),
    lines("Accepted by position", "Accepted tokens a second by their position in the draft, from 0: where the line falls, drafts "
          "can end.", _by("position", "quire_spec_decode_num_accepted_tokens_per_pos_total"), "ops"),

    row("LoRA"),
    lines("Adapters", "Adapters that requests may name.", [Query("quire_lora_adapters", "{{instance}}")], "none"),
    lines("Requests by adapter", "Prompts a second that an adapter answers; adapters beyond the 64th are together in `other`.",
          _by("adapter", "quire_lora_requests_total"), "reqps"),

    row("Tenants"),
    lines("Open requests", "By tenant; empty without --tenants.", _by("tenant", "quire_tenant_requests_open", rate=False), "none"),
    lines("Ended requests", "A second, by tenant.", _by("tenant", "quire_tenant_requests_total"), "reqps"),
    lines("Refused by a tenant's limit", "A second, by tenant and limit.",
          [Query("sum by (tenant, limit) (rate(quire_tenant_requests_refused_total[R]))", "{{tenant}} {{limit}}")], "reqps"),
    lines("Tokens by tenant", "Prompt and generated tokens a second, of requests that ended.",
          [Query("sum by (tenant, kind) (rate(quire_tenant_tokens_total[R]))", "{{tenant}} {{kind}}")], "none"),
    lines("Time to first token by tenant", "p90.",
          [Query("histogram_quantile(0.9, sum by (tenant, le) (rate(quire_tenant_time_to_first_token_seconds_bucket[R])))",
                 "{{tenant}}")], "s"),

    row("Engine"),
    quantiles("Step duration", "One forward pass, from plan to commit; a token cannot come faster.",
              "quire_step_duration_seconds"),
    lines("Batch", "Mean tokens and sequences of a step.",
          [_mean("quire_step_tokens", "tokens"), _mean("quire_step_sequences", "sequences")], "none"),
    lines("Steps", "Forward passes a second.", [_rate("quire_engine_steps_total", "steps")], "ops"),
    lines("Seconds since the last step", "0 while idle; a line that climbs is an engine that hangs.",
          [Query("quire_engine_seconds_since_step", "{{instance}}")], "s", up_to("green", 30, "red")),
    lines("Busy", "Share of time with work to do.", [Query("avg_over_time(quire_engine_busy[R])", "{{instance}}")], "percentunit"),
    lines("Failures by cause", "Sequences a second that ended on an error.", _by("cause", "quire_requests_failed_total"), "ops"),
    lines("Out of memory", "Steps a second that were planned again because the device lacked memory.",
          [_rate("quire_out_of_memory_steps_total", "steps")], "ops"),
    lines("Integrity failures", "Times that the idle engine found a leaked block, of the last hour. Any is a bug: report it.",
          [Query("sum(increase(quire_integrity_failures_total[1h]))", "leaks")], "none", up_to("green", 1, "red")),

    row("Front and health"),
    lines("HTTP requests", "Answers a second by route and status.",
          [Query("sum by (route, status) (rate(quire_http_requests_total[R]))", "{{route}} {{status}}")], "reqps"),
    lines("HTTP duration", "p90 until the last byte, by route; a stream takes as long as its answer.",
          [Query("histogram_quantile(0.9, sum by (route, le) (rate(quire_http_request_duration_seconds_bucket[R])))",
                 "{{route}}")], "s"),
    lines("Aborts", "Sequences a second that were ended early, by cause.", _by("cause", "quire_requests_aborted_total"), "ops"),
    lines("Ignored request fields", "Fields a second that were let through without effect.",
          _by("field", "quire_ignored_fields_total"), "ops"),
    quantiles("Grammars for structured outputs", "Compilation; cached grammars are not compiled.",
              "quire_grammar_compile_seconds"),
    lines("Event loop lag", "Longest time that the event loop was held up, in the last half minute to a minute.",
          [Query("quire_event_loop_lag_seconds", "{{instance}}")], "s", up_to("green", 0.5, "red")),
    lines("Process memory", "Resident memory, without the GPU's.",
          [Query("process_resident_memory_bytes", "{{instance}}")], "bytes"),
    lines("Process CPU", "Cores in use.", [Query("rate(process_cpu_seconds_total[R])", "{{instance}}")], "none"),
    lines("Open files", "File descriptors, one for each connection.",
          [Query("process_open_fds", "{{instance}}"), Query("process_max_fds", "{{instance}} limit")], "none"),
    lines("Spans of traces", "Spans a second that the collector took, and those that were dropped; empty without traces.",
          [_rate("quire_trace_spans_sent_total", "sent"),
           Query("sum by (reason) (rate(quire_trace_spans_dropped_total[R]))", "dropped: {{reason}}")], "ops"),
    table("Instances", "Versions, and the engine's settings as resolved at the start.",
          ["quire_build_info", "quire_config_info"], ("Time", "Value", "Value #A", "Value #B", "__name__", "job")),
]  # fmt: skip


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
        "sort": 1,
    }


def _placed() -> list[dict[str, Any]]:
    """Return the panels with ids and places: left to right, then down."""
    x = y = height = 0
    placed = []
    for number, panel in enumerate(PANELS, start=1):
        width, own_height = panel["gridPos"]["w"], panel["gridPos"]["h"]
        if x + width > 24 or panel["type"] == "row":
            x, y, height = 0, y + height, 0
        placed.append({"id": number, **panel, "gridPos": {"h": own_height, "w": width, "x": x, "y": y}})
        x, height = x + width, max(height, own_height)
    return placed


def dashboard() -> dict[str, Any]:
    """Return the dashboard in Grafana's classic JSON, of the version that Grafana 12 writes."""
    at = 'model_name=~"$model_name", instance=~"$instance"'
    variables = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        _variable("model_name", "Model", "label_values(quire_build_info, model_name)"),
        _variable("instance", "Instance", f"label_values(quire_build_info{{{at.partition(',')[0]}}}, instance)"),
        _variable("tenant", "Tenant", 'label_values(quire_tenant_requests_open{instance=~"$instance"}, tenant)'),
    ]
    alerts = {
        "name": "Alerts",
        "enable": True,
        "iconColor": "red",
        "datasource": SOURCE,
        "expr": 'ALERTS{alertname=~"Quire.*", alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{instance}}",
    }
    return {
        "uid": "quire",
        "title": "Quire",
        "description": "Latency, throughput, KV memory and health of Quire. docs/observe/dashboard.md says how to read it.",
        "tags": ["quire", "llm"],
        "schemaVersion": 41,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": [alerts]},
        "links": [],
        "templating": {"list": variables},
        "panels": _placed(),
    }


def main() -> None:
    """Write the dashboard to standard output."""
    json.dump(dashboard(), sys.stdout, indent=1, ensure_ascii=False)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
