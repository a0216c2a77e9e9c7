"""/metrics against the engine's own numbers: every row is there, typed, complete and adds up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path

import httpx
import pytest
from fake_adapters import AdaptableParrot, read_adapter
from harness import CONFIG as HTTP_CONFIG
from harness import Live, eventually
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from engine.adapters import Adapters
from engine.core.config import SchedulerConfig
from engine.core.scheduling.scheduler import Scheduler
from engine.core.stats import Histogram, PreemptionKind, Stats, SwapDirection, TransferKind
from engine.core.step import Runner
from engine.core.types import AbortCause, FinishReason, Request, SamplingParams, TokenEvent
from engine.handle import EngineFacts
from engine.loop import Engine
from loadtest.fake_runner import FakeRunner
from server.telemetry.event_metrics import MAX_NAMES
from server.telemetry.events import FieldIgnored, HttpAnswered
from server.telemetry.metrics import METRICS, VLLM_METRICS, Metrics
from tests.patience import PATIENCE_S

NUM_REQUESTS = 5


CONFIG = SchedulerConfig(num_blocks=64, block_size=4, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64)


def started_engine() -> Engine:
    return Engine(Scheduler(CONFIG), FakeRunner(CONFIG), EngineFacts(512))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """An engine that has answered NUM_REQUESTS with a shared prompt, and ended one early."""
    engine = started_engine()
    ended = threading.Semaphore(0)

    def deliver(events: Iterable[TokenEvent]) -> None:
        for event in events:
            if event.finish_reason is not None:
                ended.release()

    engine.start(deliver)
    for index in range(NUM_REQUESTS):
        params = SamplingParams(max_tokens=index + 1, temperature=0.0)
        engine.submit(Request(request_id=f"r{index}", prompt=(1,) * 9, params=params, arrival_s=engine.clock()))
        assert ended.acquire(timeout=PATIENCE_S)
    endless = SamplingParams(max_tokens=100, temperature=0.0)
    left = Request(request_id="left", prompt=(2,) * 9, params=endless, arrival_s=engine.clock())

    def leave(scheduler: Scheduler, _: Runner) -> None:
        """Both come before the next step."""
        engine.submit(left)
        engine.abort("left", AbortCause.DISCONNECT)

    engine.between_steps(leave)
    assert ended.acquire(timeout=PATIENCE_S)
    yield engine
    engine.stop(0.0)


def scrape(metrics: Metrics) -> Mapping[str, Metric]:
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(body.decode())}


def value(family: Metric, **labels: str) -> float:
    (number,) = (sample.value for sample in family.samples if labels.items() <= sample.labels.items())
    return number


def test_every_row_is_exposed_with_its_model_and_help(engine: Engine) -> None:
    families = scrape(Metrics(compat_vllm=False).add_model("tiny", engine))
    for metric in METRICS:
        family = families[metric.name.removesuffix("_total")]
        assert family.documentation == metric.help
        assert family.type == metric.kind.name.lower()
        assert family.samples
        assert all(sample.labels["model_name"] == "tiny" for sample in family.samples)
    assert not any(name.startswith("vllm:") for name in families)
    assert {"python_info", "process_resident_memory_bytes"} <= families.keys()


HISTOGRAMS = ("quire_request_prompt_tokens", "quire_request_generation_tokens")


def test_counters_are_the_engines(engine: Engine) -> None:
    families = scrape(Metrics(compat_vllm=False).add_model("tiny", engine))
    stats = engine.stats
    assert value(families["quire_requests_finished"], reason="length") == NUM_REQUESTS
    assert value(families["quire_requests_finished"], reason="abort") == 1
    assert value(families["quire_requests_aborted"], cause="disconnect") == 1
    assert value(families["quire_prefix_cache_hit_tokens"]) == (NUM_REQUESTS - 1) * 8
    assert value(families["quire_generation_tokens"]) == stats.generation_tokens >= 1 + 2 + 3 + 4 + 5
    samples = {sample.name: sample.value for name in HISTOGRAMS for sample in families[name].samples}
    num_ended = sum(sample.value for sample in families["quire_requests_finished"].samples)
    assert samples["quire_request_prompt_tokens_count"] == samples["quire_request_generation_tokens_count"] == num_ended
    assert samples["quire_request_generation_tokens_sum"] == value(families["quire_generation_tokens"])
    assert {sample.labels["reason"] for sample in families["quire_requests_finished"].samples} == {
        reason.value for reason in FinishReason
    }


SHOWN = {
    "quire_num_requests_running": "num_running",
    "quire_num_requests_waiting": "num_waiting",
    "quire_num_requests_preempted": "num_preempted",
    "quire_num_waiting_tokens": "num_waiting_tokens",
    "quire_tokens_per_second": "tokens_per_s",
    "quire_engine_steps_total": "steps",
    "quire_background_steps_total": "background_steps",
    "quire_prompt_tokens_total": "prompt_tokens",
    "quire_generation_tokens_total": "generation_tokens",
    "quire_prefix_cache_queried_tokens_total": "prefix_queried_tokens",
    "quire_prefix_cache_hit_tokens_total": "prefix_hit_tokens",
    "quire_integrity_failures_total": "integrity_failures",
    "quire_out_of_memory_steps_total": "out_of_memory_steps",
    "quire_requests_rejected_total": "rejected",
    "quire_requests_targeted_total": "targeted",
    "quire_requests_met_targets_total": "met",
    "quire_spec_decode_num_drafts_total": "spec_drafts",
    "quire_spec_decode_num_draft_tokens_total": "spec_draft_tokens",
    "quire_spec_decode_num_accepted_tokens_total": "spec_accepted_tokens",
    "quire_fairness_preemptions_total": "yielded",
    "quire_time_to_first_token_seconds": "ttft_s",
    "quire_time_per_output_token_seconds": "tpot_s",
    "quire_inter_token_latency_seconds": "itl_s",
    "quire_e2e_request_latency_seconds": "e2e_s",
    "quire_request_queue_time_seconds": "queue_s",
    "quire_request_prefill_time_seconds": "prefill_s",
    "quire_request_decode_time_seconds": "decode_s",
    "quire_step_duration_seconds": "step_s",
    "quire_step_tokens": "step_tokens",
    "quire_step_sequences": "step_sequences",
    "quire_request_prompt_tokens": "request_prompt_tokens",
    "quire_request_generation_tokens": "request_generation_tokens",
    "quire_pins_refused_total": "pins_refused",
    "quire_swap_failures_total": "failed_copies",
    "quire_kv_block_waste_ratio": "blocks_waste",
}
LABELLED = {"missed", "dropped", "finished", "failed", "aborted", "preempted", "swapped_blocks"}
LABELLED |= {"prefix_hits", "transferred", "failed_transfers", "findable_blocks"}
BACKGROUND = {"num_background_running", "num_background_waiting"}
BLOCKS = {"blocks_free", "blocks_cached", "blocks_held", "host_blocks_free", "host_blocks_cached", "host_blocks_held"}
BLOCKS |= {"blocks_pinned", "host_blocks_pinned", "store_blocks", "store_blocks_pinned"}
ELSEWHERE = (
    LABELLED
    | BACKGROUND
    | BLOCKS
    | {
        "last_step_s",
        "answer_s",
        "spec_accepted_at",
        "grammar_s",
        "adapters_running",
        "adapters_waiting",
        "num_further",
    }
)


def test_every_number_of_the_engines_is_shown_under_its_own_name() -> None:
    stats = Stats()
    assert {field.name for field in fields(Stats)} == ELSEWHERE | set(SHOWN.values())
    rows = {metric.name: metric for metric in METRICS}
    for mark, (name, attribute) in enumerate(SHOWN.items(), start=1):
        if isinstance(number := getattr(stats, attribute), Histogram):
            assert rows[name].read(stats) is number
        else:
            setattr(stats, attribute, mark)
            assert rows[name].read(stats) == mark


def test_the_background_is_told_by_state(engine: Engine) -> None:
    engine.stats.num_background_running, engine.stats.num_background_waiting = 2, 5
    family = scrape(Metrics(compat_vllm=False).add_model("tiny", engine))["quire_num_requests_background"]
    assert {sample.labels["state"]: sample.value for sample in family.samples} == {"running": 2, "waiting": 5}


def test_blocks_add_up_to_the_pool(engine: Engine) -> None:
    families = scrape(Metrics(compat_vllm=False).add_model("tiny", engine))
    blocks = {sample.labels["state"]: sample.value for sample in families["quire_kv_blocks"].samples}
    assert sum(blocks.values()) == 64
    assert blocks["held"] == 0
    assert blocks["cached"] > 0
    assert value(families["quire_config_info"], num_blocks="64", block_size="4") == 1


def test_histograms_are_cumulative_and_complete(engine: Engine) -> None:
    families = scrape(Metrics(compat_vllm=False).add_model("tiny", engine))
    histograms = [metric for metric in METRICS if metric.kind.name == "HISTOGRAM"]
    assert len(histograms) == 13
    for metric in histograms:
        stats = metric.read(engine.stats)
        assert isinstance(stats, Histogram)
        samples = families[metric.name].samples
        buckets = [(float(sample.labels["le"]), sample.value) for sample in samples if sample.name.endswith("_bucket")]
        assert [bound for bound, _ in buckets] == [*stats.bounds, float("inf")]
        assert [count for _, count in buckets] == [sum(stats.counts[: index + 1]) for index in range(len(buckets))]
        suffixes = {sample.name.removeprefix(metric.name): sample.value for sample in samples}
        assert suffixes["_count"] == stats.count == buckets[-1][1]
        assert suffixes["_sum"] == pytest.approx(stats.sum)
    assert families["quire_time_to_first_token_seconds"].samples[-2].value == NUM_REQUESTS


def test_vllm_names_carry_the_same_numbers(engine: Engine) -> None:
    families = scrape(Metrics(compat_vllm=True).add_model("tiny", engine))
    for metric in VLLM_METRICS:
        name = metric.name if metric.kind.name == "HISTOGRAM" else metric.name.removesuffix("_total")
        assert all(sample.labels["engine"] == "0" for sample in families[name].samples)
    assert value(families["vllm:request_success"], finished_reason="length") == NUM_REQUESTS
    assert value(families["vllm:generation_tokens"]) == engine.stats.generation_tokens
    ours, theirs = families["quire_step_tokens"], families["vllm:iteration_tokens_total"]
    assert [sample.value for sample in ours.samples] == [sample.value for sample in theirs.samples]


def test_preempted_requests_wait_in_vllms_eyes() -> None:
    engine = started_engine()
    engine.stats.num_waiting, engine.stats.num_preempted = 3, 2
    families = scrape(Metrics(compat_vllm=True).add_model("tiny", engine))
    assert value(families["quire_num_requests_waiting"]) == 3
    assert value(families["quire_num_requests_preempted"]) == 2
    assert value(families["vllm:num_requests_waiting"]) == 5


def test_preemptions_and_what_was_moved_for_them() -> None:
    engine = started_engine()
    stats = engine.stats
    stats.preempted[PreemptionKind.SWAP], stats.preempted[PreemptionKind.RECOMPUTE] = 3, 2
    stats.swapped_blocks[SwapDirection.OUT], stats.swapped_blocks[SwapDirection.IN] = 9, 7
    stats.host_blocks_free, stats.host_blocks_held = 30, 2
    families = scrape(Metrics(compat_vllm=True).add_model("tiny", engine))
    assert [value(families["quire_preemptions"], kind=kind) for kind in ("swap", "recompute")] == [3, 2]
    assert [value(families["quire_swapped_blocks"], direction=way) for way in ("out", "in")] == [9, 7]
    assert [value(families["quire_swap_blocks"], state=state) for state in ("free", "held")] == [30, 2]
    assert value(families["vllm:num_preemptions"]) == 5


def test_what_lower_tiers_of_the_prefix_cache_did() -> None:
    engine = started_engine()
    stats = engine.stats
    stats.prefix_hits |= {"pool": 5, "host": 6, "disk": 7}
    stats.transferred |= {TransferKind.LOAD: 8, TransferKind.SAVE: 9}
    stats.failed_transfers[TransferKind.LOAD] = 1
    stats.host_blocks_cached = 4
    families = scrape(Metrics(compat_vllm=False).add_model("tiny", engine))
    hits = families["quire_prefix_cache_tier_hit_tokens"]
    assert [value(hits, tier=tier) for tier in ("pool", "host", "disk")] == [5, 6, 7]
    assert [value(families["quire_kv_offload_blocks"], direction=way) for way in ("fetch", "store")] == [8, 9]
    assert [value(families["quire_kv_offload_failures"], direction=way) for way in ("fetch", "store")] == [1, 0]
    assert value(families["quire_swap_blocks"], state="cached") == 4


def test_health_is_told() -> None:
    engine = started_engine()
    metrics = Metrics(compat_vllm=False).add_model("tiny", engine)
    assert value(scrape(metrics)["quire_engine_alive"]) == 0
    engine.start(lambda events: None)
    assert value(scrape(metrics)["quire_engine_alive"]) == 1
    engine.stop(0.0)
    assert value(scrape(metrics)["quire_engine_alive"]) == 0


def test_names_that_clients_choose_cannot_grow_without_end(engine: Engine) -> None:
    metrics = Metrics(compat_vllm=False).add_model("tiny", engine)
    for index in range(1000):
        metrics.listeners[0](FieldIgnored(f"field{index}"))
    metrics.listeners[0](FieldIgnored("field0"))
    family = scrape(metrics)["quire_ignored_fields"]
    counts = {sample.labels["field"]: sample.value for sample in family.samples if sample.name.endswith("_total")}
    assert len(counts) == MAX_NAMES + 1
    assert counts["field0"] == 2
    assert counts["other"] == 1000 - MAX_NAMES


def test_http_requests_are_counted_by_route_method_and_status(engine: Engine) -> None:
    metrics = Metrics(compat_vllm=False).add_model("tiny", engine)
    metrics.listeners[0](HttpAnswered("a", "/v1/completions", "POST", 200, 0.2, None))
    metrics.listeners[0](HttpAnswered("b", "/v1/completions", "POST", 429, 0.001, None))
    families = scrape(metrics)
    requests = {
        sample.labels["status"]: sample.value
        for sample in families["quire_http_requests"].samples
        if sample.name.endswith("_total")
    }
    assert requests == {"200": 1, "429": 1}
    seconds = {sample.name: sample.value for sample in families["quire_http_request_duration_seconds"].samples}
    assert seconds["quire_http_request_duration_seconds_sum"] == pytest.approx(0.201)


def test_drafts_are_counted_by_their_place() -> None:
    config = replace(CONFIG, num_speculative_tokens=3)
    engine = Engine(Scheduler(config), FakeRunner(config, acceptance=1.0), EngineFacts(512))
    ended = threading.Event()
    engine.start(lambda events: ended.set() if any(event.finish_reason for event in events) else None)
    params = SamplingParams(max_tokens=9, temperature=0.0)  # one behind the prompt, and twice four
    engine.submit(Request(request_id="r", prompt=(1, 2), params=params, arrival_s=engine.clock()))
    assert ended.wait(PATIENCE_S)
    engine.stop(0.0)
    families = scrape(Metrics(compat_vllm=True).add_model("m", engine))
    for prefix in ("quire_", "vllm:"):
        found = [
            value(families[f"{prefix}spec_decode_num_{name}"]) for name in ("drafts", "draft_tokens", "accepted_tokens")
        ]
        assert found == [2, 6, 6]
        by_place = families[f"{prefix}spec_decode_num_accepted_tokens_per_pos"]
        assert [value(by_place, position=str(place)) for place in range(3)] == [2, 2, 2]


# -- of requests, under vLLM's names -----------------------------------------------------------------------------------

SECONDS = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680, float("inf")]
TOKENS = [1, 2, 5, 10, 20, 50, 100, 200, 500, float("inf")]  # up to the harness' context of 512
REQUEST_HISTOGRAMS = {
    "vllm:request_inference_time_seconds": SECONDS,
    "vllm:request_params_n": [1, 2, 5, 10, 20, float("inf")],
    "vllm:request_params_max_tokens": TOKENS,
    "vllm:request_max_num_generation_tokens": TOKENS,
}


def sums(text: str) -> dict[str, tuple[float, float]]:
    """Count and sum of each histogram of requests."""
    found = {}
    for family in text_string_to_metric_families(text):
        if family.name in REQUEST_HISTOGRAMS:
            values = {sample.name.removeprefix(family.name): sample.value for sample in family.samples}
            found[family.name.removeprefix("vllm:request_")] = values["_count"], values["_sum"]
    return found


def test_requests_are_told_in_vllms_types_labels_and_buckets(serve: Callable[..., Live]) -> None:
    live = serve(metrics_compat="vllm")
    families = {family.name: family for family in text_string_to_metric_families(httpx.get(live.url + "/metrics").text)}
    for name, bounds in REQUEST_HISTOGRAMS.items():
        family = families[name]
        assert family.type == "histogram"
        buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
        assert [float(sample.labels["le"]) for sample in buckets] == bounds
        assert all(sample.labels.keys() == {"model_name", "engine", "le"} for sample in buckets)
        assert {(sample.labels["model_name"], sample.labels["engine"]) for sample in buckets} == {("parrot", "0")}
    assert "vllm:lora_requests_info" not in families, "there is no room for adapters"
    assert "vllm:request_params_n" not in httpx.get(serve().url + "/metrics").text


def test_completed_requests_are_counted_once_with_their_parameters(serve: Callable[..., Live]) -> None:
    live = serve(metrics_compat="vllm", step_s=0.01)
    with httpx.Client(base_url=live.url) as http:
        http.post(
            "/v1/completions", json={"prompt": ["ab|", "c|"], "n": 2, "max_tokens": 7}
        )  # 3 + 3, 2 + 2 with the end
        http.post("/v1/completions", json={"prompt": "x", "max_tokens": 4, "stream": True})
        http.post("/v1/embeddings", json={"input": "abc"})
        http.post("/v1/completions", json={"prompt": ""})
        with http.stream("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 400, "stream": True}) as left:
            next(left.iter_lines())
        eventually(lambda: live.context.client.num_open == 0)
        counted = sums(http.get("/metrics").text)
    assert counted["params_n"] == (4, 2 + 2 + 1 + 1)
    assert counted["params_max_tokens"] == (3, 7 + 7 + 4)
    longest = counted["max_num_generation_tokens"]
    assert longest[0] == 4
    assert 2 + 1 + 4 <= longest[1] <= 3 + 2 + 4
    assert counted["inference_time_seconds"][0] == 6
    assert counted["inference_time_seconds"][1] > 4 * 0.01


def test_adapters_in_use_are_told_as_routers_read_them(serve: Callable[..., Live], tmp_path: Path) -> None:
    (tmp_path / "by1").write_text("1")
    adapters = Adapters(read_adapter, max_loras=3)
    for name in ("b", "a"):
        adapters.load(name, str(tmp_path / "by1"))
    live = serve(
        metrics_compat="vllm",
        adapters=adapters,
        runner=AdaptableParrot,
        config=replace(HTTP_CONFIG, max_num_seqs=1),
        step_s=0.05,
    )

    def told() -> tuple[str, str, str]:
        (sample,) = next(
            family.samples
            for family in text_string_to_metric_families(httpx.get(live.url + "/metrics").text)
            if family.name == "vllm:lora_requests_info"
        )
        assert abs(sample.value - time.time()) < 3600, "the value is the time"
        labels = sample.labels
        assert labels.keys() == {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}
        return labels["max_lora"], labels["running_lora_adapters"], labels["waiting_lora_adapters"]

    assert told() == ("3", "", "")
    body = {"prompt": "x", "max_tokens": 400, "stream": True}
    with ExitStack() as stack:
        for index, name in enumerate(("a", "b", "a")):
            stack.enter_context(httpx.stream("POST", live.url + "/v1/completions", json={**body, "model": name}))
            eventually(lambda open_=index + 1: live.engine.stats.num_running + live.engine.stats.num_waiting == open_)
        assert told() == ("3", "a", "a,b")
    eventually(lambda: told() == ("3", "", ""))
