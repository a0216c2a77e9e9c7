"""The engine's metrics, as rows of a table: name, meaning, and value in Stats.

A metric is one row here, which reads a field of Stats (engine/core/stats.py); engine/core/scheduling/stats_recorder.py counts it.
The help text is what Prometheus shows; server/telemetry/metrics.py renders rows at each scrape. VLLM_METRICS are the same
rows under vLLM's names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import accumulate
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
    source: str | Callable[[Stats], Value]  # a field or property of Stats, or what computes the value
    label: str = ""

    def read(self, stats: Stats) -> Value:
        """Return the metric's current value."""
        value: Value = getattr(stats, self.source) if isinstance(self.source, str) else self.source(stats)
        return value

    def family(self, stats: Stats, common: Mapping[str, str]) -> Family:
        """Return the metric's current samples, each with the `common` labels."""
        labels = [*common, self.label] if self.label else list(common)
        family: Family = self.kind.value(self.name, self.help, labels=labels)
        value = self.read(stats)
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


def _background(stats: Stats) -> Mapping[str, float]:
    return {"running": stats.num_background_running, "waiting": stats.num_background_waiting}


def _blocks(stats: Stats) -> Mapping[str, float]:
    return {"free": stats.blocks_free, "cached": stats.blocks_cached, "held": stats.blocks_held}


def _host(stats: Stats) -> Mapping[str, float]:
    return {"free": stats.host_blocks_free, "cached": stats.host_blocks_cached, "held": stats.host_blocks_held}


def _pinned(stats: Stats) -> Mapping[str, float]:
    return {"pool": stats.blocks_pinned, "host": stats.host_blocks_pinned, **stats.store_blocks_pinned}


_gauge, _counter, _histogram = (partial(Metric, kind) for kind in Kind)

METRICS = (
    _gauge("quire_num_requests_running", "Sequences in the running batch.", "num_running"),
    _gauge("quire_num_requests_waiting", "Requests waiting to be scheduled for the first time.", "num_waiting"),
    _gauge("quire_num_requests_preempted", "Preempted sequences waiting to resume.", "num_preempted"),
    _gauge("quire_num_requests_background", "Sequences of batches by state: running, waiting.", _background, "state"),
    _gauge(
        "quire_num_waiting_tokens", "Prompt tokens of waiting requests that are not computed yet.", "num_waiting_tokens"
    ),
    _gauge("quire_kv_blocks", "KV blocks by state: held by sequences, cached for reuse, free.", _blocks, "state"),
    _gauge(
        "quire_kv_findable_blocks",
        "KV blocks that prompts find, held or cached, by group of layers: full attention, a window, or recurrent state; as of the last step.",
        "findable_blocks",
        "group",
    ),
    _gauge(
        "quire_swap_blocks",
        "Blocks in host memory by state: held by preempted sequences or on their way, cached behind the pool, free.",
        _host,
        "state",
    ),
    _gauge(
        "quire_pinned_blocks",
        "Blocks of prefixes pinned by requests or the operator, by tier; as of the last step.",
        _pinned,
        "tier",
    ),
    _gauge("quire_kv_offload_disk_blocks", "Cached blocks on the disk.", lambda s: s.store_blocks["disk"]),
    _gauge(
        "quire_kv_offload_shared_blocks",
        "Cached blocks of other daemons that this one can load.",
        lambda s: s.store_blocks["shared"],
    ),
    _gauge("quire_kv_cache_usage_ratio", "Share of the KV pool that live sequences hold, 0-1.", "kv_cache_usage_ratio"),
    _gauge("quire_tokens_per_second", "Recent rate of computed tokens while busy.", "tokens_per_s"),
    _counter("quire_engine_steps_total", "Forward passes.", "steps"),
    _counter(
        "quire_background_steps_total",
        "Forward passes of batch requests, out of quire_engine_steps_total.",
        "background_steps",
    ),
    _counter("quire_prompt_tokens_total", "Prompt tokens whose prefill completed.", "prompt_tokens"),
    _counter("quire_generation_tokens_total", "Tokens generated.", "generation_tokens"),
    _counter(
        "quire_prefix_cache_queried_tokens_total",
        "Prompt tokens looked up in the prefix cache.",
        "prefix_queried_tokens",
    ),
    _counter("quire_prefix_cache_hit_tokens_total", "Prompt tokens found in the prefix cache.", "prefix_hit_tokens"),
    _counter(
        "quire_prefix_cache_tier_hit_tokens_total",
        "Prompt tokens found in the prefix cache, by tier: the KV pool, host memory, the disk, other daemons' part of it.",
        "prefix_hits",
        "tier",
    ),
    _counter(
        "quire_pins_refused_total",
        "Blocks that were not pinned because --pinned-prefix-share was used up.",
        "pins_refused",
    ),
    _counter(
        "quire_kv_offload_blocks_total", "Blocks loaded from the disk and saved to it.", "transferred", "direction"
    ),
    _counter(
        "quire_kv_offload_failures_total",
        "Blocks that could not be moved, or were damaged; their content was recomputed.",
        "failed_transfers",
        "direction",
    ),
    _counter(
        "quire_preemptions_total",
        "Sequences preempted because the KV pool was exhausted, by how their K/V is restored.",
        "preempted",
        "kind",
    ),
    _counter(
        "quire_fairness_preemptions_total", "Preemptions that made room for a tenant that held far less.", "yielded"
    ),
    _counter(
        "quire_spec_decode_num_drafts_total", "Drafts: times that tokens were drafted for a sequence.", "spec_drafts"
    ),
    _counter("quire_spec_decode_num_draft_tokens_total", "Tokens drafted.", "spec_draft_tokens"),
    _counter(
        "quire_spec_decode_num_accepted_tokens_total", "Drafted tokens that were accepted.", "spec_accepted_tokens"
    ),
    _counter(
        "quire_spec_decode_num_accepted_tokens_per_pos_total",
        "Drafted tokens that were accepted, by position in the draft, from 0.",
        lambda s: dict(enumerate(s.spec_accepted_at)),
        "position",
    ),
    _counter(
        "quire_swap_failures_total",
        "Steps rolled back because blocks could not be copied to or from host memory; then copying stops.",
        "failed_copies",
    ),
    _counter(
        "quire_swapped_blocks_total",
        "KV blocks copied out to host memory, and in again.",
        "swapped_blocks",
        "direction",
    ),
    _gauge(
        "quire_kv_block_waste_ratio",
        "Share of block slots that stayed empty in the sequences that ended last, 0-1; updated while idle.",
        "blocks_waste",
    ),
    _counter(
        "quire_integrity_failures_total", "Times that the idle engine found a leaked block.", "integrity_failures"
    ),
    _counter(
        "quire_out_of_memory_steps_total",
        "Steps planned again because the device lacked memory.",
        "out_of_memory_steps",
    ),
    _counter("quire_requests_rejected_total", "Requests refused because the queue was full.", "rejected"),
    _counter(
        "quire_requests_targeted_total",
        "Answers completed or dropped that had a latency target or a deadline.",
        "targeted",
    ),
    _counter("quire_requests_met_targets_total", "Answers that met all of their targets: goodput.", "met"),
    _counter("quire_requests_missed_targets_total", "Targets missed: ttft, itl, deadline, queue.", "missed", "target"),
    _counter(
        "quire_requests_dropped_total",
        "Requests dropped before prefill because they could not be in time.",
        "dropped",
        "reason",
    ),
    _counter("quire_requests_finished_total", "Sequences ended, by finish reason.", "finished", "reason"),
    _counter("quire_requests_failed_total", "Sequences ended on an error, by cause.", "failed", "cause"),
    _counter("quire_requests_aborted_total", "Sequences ended early, by cause.", "aborted", "cause"),
    _histogram("quire_time_to_first_token_seconds", "Arrival until the first token.", "ttft_s"),
    _histogram("quire_time_per_output_token_seconds", "A request's mean time per token after the first.", "tpot_s"),
    _histogram("quire_inter_token_latency_seconds", "Every gap between two tokens of a sequence.", "itl_s"),
    _histogram("quire_e2e_request_latency_seconds", "Arrival until the last token.", "e2e_s"),
    _histogram("quire_request_queue_time_seconds", "Arrival until first scheduled.", "queue_s"),
    _histogram("quire_request_prefill_time_seconds", "First scheduled until the first token.", "prefill_s"),
    _histogram("quire_request_decode_time_seconds", "First token until the last.", "decode_s"),
    _histogram("quire_step_duration_seconds", "One forward pass, plan to commit.", "step_s"),
    _histogram("quire_step_tokens", "Tokens computed in a step.", "step_tokens"),
    _histogram("quire_step_sequences", "Sequences in a step.", "step_sequences"),
    _histogram("quire_request_prompt_tokens", "Prompt length of ended sequences.", "request_prompt_tokens"),
    _histogram(
        "quire_predicted_length_error_tokens",
        "Absolute error of sjf's prediction of an answer's length.",
        "length_error_tokens",
    ),
    _histogram("quire_request_generation_tokens", "Tokens generated by ended sequences.", "request_generation_tokens"),
)

# vLLM's names, so that dashboards and autoscalers made for it work: "vllm:" instead of "quire_" ...
_SAME_NAMES = (
    "num_requests_running", "prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens",
    "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
)  # fmt: skip
_OTHER_NAMES = {  # ... or another name
    "quire_kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
    "quire_prefix_cache_queried_tokens_total": "vllm:prefix_cache_queries_total",
    "quire_prefix_cache_hit_tokens_total": "vllm:prefix_cache_hits_total",
    "quire_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "quire_step_tokens": "vllm:iteration_tokens_total",
}


def _vllm() -> Iterator[Metric]:
    ours = {metric.name: metric for metric in METRICS}
    for name, vllm_name in ({f"quire_{name}": f"vllm:{name}" for name in _SAME_NAMES} | _OTHER_NAMES).items():
        yield replace(ours[name], name=vllm_name)
    yield replace(ours["quire_requests_finished_total"], name="vllm:request_success_total", label="finished_reason")
    yield _counter("vllm:num_preemptions_total", "Sequences preempted, of any kind.", "preemptions")
    yield _counter(
        "vllm:corrupted_requests_total",
        "Requests whose logits were not finite.",
        lambda s: s.failed[FailureCause.NOT_FINITE],
    )
    yield _gauge(
        "vllm:num_requests_waiting",
        "Requests waiting to be scheduled, preempted ones included.",
        lambda s: s.num_waiting + s.num_preempted,
    )


GRAMMAR_METRICS = (
    Metric(
        Kind.HISTOGRAM,
        "quire_grammar_compile_seconds",
        "Compilation of a grammar for structured outputs; cached grammars are not compiled.",
        "grammar_s",
    ),
)  # without the labels of the others

VLLM_METRICS = tuple(_vllm())
