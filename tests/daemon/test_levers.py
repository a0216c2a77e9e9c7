"""Every lever of docs/tune.md, pulled on the real daemon with the real model: its promise is seen from outside."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from real_daemon import SMALL, Daemon, refusal, serve

from engine.sources.model_source import find_model
from server import cli
from tests.cpu.served_models import save_servable
from tests.cpu.test_models_families import CASES
from tests.patience import eventually
from tools import start_imports

SHORT = "Once upon a time there was a small paper mill by a river, and its owner counted every sheet. "
LONG = SHORT * 8  # ~170 tokens
CROWDED = 60  # tokens of each of six texts
COUNT = "1, 2, 3, 4,"
REPETITIVE = "a b c d e a b c d e a b c"
LONGER: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
IN_FLOAT32 = (
    "--max-model-len",
    "512",
    "--kv-cache-memory-bytes",
    "128MiB",
    "--dtype",
    "float32",
    "--max-num-seqs",
    "4",
)
OTHER = "The harbour was quiet that morning, and three boats waited for a wind that would not come. " * 8


def together(daemon: Daemon, max_tokens: int) -> list[str]:
    """Texts of six different prompts, requested concurrently."""
    with ThreadPoolExecutor(6) as pool:
        return list(pool.map(lambda i: daemon.text(f"{i}: {SHORT}", max_tokens=max_tokens, ignore_eos=True), range(6)))


class Plain(NamedTuple):
    """What the default settings answer."""

    short: str
    crowd: list[str]  # more tokens at a time than a pool of 24 blocks holds


@pytest.fixture(scope="module")
def default() -> Iterator[Daemon]:
    """A daemon without levers, which writes its imports into its log."""
    with serve(*SMALL, PYTHONPROFILEIMPORTTIME="1") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def plain(default: Daemon) -> Plain:
    assert default.metric("quire_kv_blocks", state="free") > 0
    return Plain(default.text(), together(default, CROWDED))


def test_a_start_imports_no_more_than_its_table_allows(default: Daemon) -> None:
    loaded = start_imports.count(default.log)
    assert "server.answers" in loaded, default.written
    assert start_imports.over(loaded, start_imports.TABLE.read_text(encoding="utf-8")) == []


def test_a_small_pool_preempts_and_loses_no_text(plain: Plain) -> None:
    # --num-gpu-blocks-override, --max-num-seqs, --max-num-batched-tokens, --block-size: less of each, the same text.
    flags = ("--max-model-len", "256", "--num-gpu-blocks-override", "36", "--max-num-seqs", "4", "--block-size", "8")
    policies = ("--scheduling-policy", "priority")
    with serve(*flags, "--max-num-batched-tokens", "64", *policies) as daemon:
        assert together(daemon, CROWDED) == plain.crowd
        assert daemon.metric("quire_preemptions_total") > 0
        assert [daemon.cached(LONG)["cached_tokens"] > 100 for _ in range(2)] == [False, True]


def test_swapped_sequences_on_two_threads_without_a_prefix_cache_say_the_same(plain: Plain) -> None:
    flags = ("--max-model-len", "256", "--num-gpu-blocks-override", "24", "--swap-space", "0.1")
    with serve(*flags, "--no-enable-prefix-caching", "--enforce-eager", "--threads", "2") as daemon:
        assert together(daemon, CROWDED) == plain.crowd
        assert daemon.metric("quire_preemptions_total", kind="swap") > 0
        assert [daemon.cached(LONG)["cached_tokens"] for _ in range(2)] == [0, 0]


def test_a_pool_too_small_for_the_context_is_refused_with_the_length_that_fits() -> None:
    said = refusal("--kv-cache-memory-bytes", "2MiB", "--max-model-len", "4096")
    assert "--max-model-len" in said
    assert "4096" in said


def test_a_context_that_fits_is_found_and_a_request_that_cannot_be_in_time_is_a_408() -> None:
    with serve("--kv-cache-memory-bytes", "128MiB", "--max-num-seqs", "1") as daemon:
        length = daemon.http.get("/v1/models").json()["data"][0]["max_model_len"]
        assert 4096 < length < 8192
        assert str(length) in daemon.written.replace(",", "")
        endless = {"prompt": LONG, "max_tokens": length - 256, "ignore_eos": True, "stream": True}
        with daemon.http.stream("POST", "/v1/completions", json=endless) as stream:
            lines = stream.iter_lines()
            next(lines)  # the only slot is taken
            for limit in ("deadline_ms", "max_queue_ms"):
                answer = daemon.http.post("/v1/completions", json={"prompt": OTHER, "max_tokens": 8, limit: 200})
                assert answer.status_code == 408, answer.text


def test_prefixes_are_shared_unless_salted(default: Daemon) -> None:
    assert default.cached(LONG)["cached_tokens"] == 0
    assert default.cached(LONG)["cached_tokens"] > 100
    assert default.cached(LONG, cache_salt="mine")["cached_tokens"] == 0


def test_an_answer_that_comes_back_keeps_its_tokens(default: Daemon) -> None:
    """Text drawn at random is hardly ever encoded to the tokens that were drawn."""

    def post(path: str, **body: Any) -> Any:
        return default.http.post(path, json=body).json()

    question = {"role": "user", "content": SHORT}
    fields: dict[str, Any] = {"max_tokens": 60, "temperature": 2.0, "seed": 1, "return_token_ids": True}
    first = post("/v1/chat/completions", messages=[question], **fields)
    [choice] = first["choices"]
    messages = [question, choice["message"], question]
    again = post("/v1/chat/completions", messages=messages, **fields)["prompt_token_ids"]
    whole = first["prompt_token_ids"] + choice["token_ids"][:-1]
    assert again[: len(whole)] == whole
    assert post("/tokenize", messages=messages, add_generation_prompt=True)["tokens"] != again


def test_cached_blocks_are_found_on_the_disk_after_a_restart(tmp_path: Path) -> None:
    flags = (
        *SMALL,
        "--kv-offload-config",
        json.dumps({"host_gib": 0.05, "folder": str(tmp_path / "blocks"), "disk_gib": 0.05}),
    )
    with serve(*flags) as daemon:
        text = daemon.text(LONG)
    with serve(*flags) as daemon:
        assert daemon.text(LONG) == text
        # A prompt is computed if a busy disk lets it wait for long, and its blocks come all the same.
        eventually(lambda: daemon.metric("quire_kv_offload_blocks_total", direction="fetch") * 16 > 100)


def test_a_pinned_prefix_outlives_a_scan_and_overlap_changes_no_text(plain: Plain) -> None:
    flags = ("--max-model-len", "512", "--num-gpu-blocks-override", "45", "--pinned-prefix-share", "0.5")
    policies = ("--scheduling-policy", "priority", "--max-num-seqs", "2")
    overlap = ("--async-scheduling", "--target-itl-ms", "600000", "--target-ttft-ms", "600000")
    with serve(*flags, *policies, *overlap) as daemon:
        daemon.complete(LONG, max_tokens=1, prompt_cache_retention="24h")
        check_plain(daemon, plain)
        for number in range(6):
            daemon.complete(f"{number} {OTHER}", max_tokens=1)
        assert daemon.cached(LONG + " And then")["cached_tokens"] > 100
        assert daemon.metric("quire_requests_met_targets_total") == daemon.metric("quire_requests_targeted_total") > 0


def check_plain(daemon: Daemon, plain: Plain) -> None:
    """Short texts are those of the default settings, alone and together."""
    assert daemon.text() == plain.short
    assert all(whole.startswith(text) for text, whole in zip(together(daemon, 8), plain.crowd, strict=True))


def test_tenants_are_limited_by_their_file(plain: Plain, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(
        """
tiers:
  gold: {weight: 4}
  free: {weight: 1, max_concurrent_requests: 4, tokens_per_minute: 40}
tenants:
  - {name: acme, tier: gold, key_env: ACME_KEY}
  - {name: here, tier: free, key: in-plain-sight, weight: 2}
"""
    )
    flags = ("--scheduling-policy", "fair", "--max-num-seqs", "2")
    with serve(*SMALL, *flags, "--tenants", file, ACME_KEY="of-acme") as daemon:
        ask = {"prompt": OTHER, "max_tokens": 1}
        assert daemon.http.post("/v1/completions", json=ask).status_code == 401
        here = {"authorization": "Bearer in-plain-sight"}
        first = daemon.http.post("/v1/completions", json=ask, headers=here)
        assert first.headers["x-ratelimit-remaining-tokens"] == "0"
        refused = daemon.http.post("/v1/completions", json=ask, headers=here)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 0
        daemon.http.headers["authorization"] = "Bearer of-acme"
        check_plain(daemon, plain)
        assert [daemon.cached(LONG)["cached_tokens"] > 100 for _ in range(2)] == [False, True]


@pytest.fixture(scope="module")
def in_float32() -> tuple[str, str]:
    """What a daemon answers that computes in float32: a count, and a text that repeats itself."""
    with serve(*IN_FLOAT32) as daemon:
        return daemon.text(COUNT, max_tokens=4), daemon.text(REPETITIVE, **LONGER)


@pytest.mark.parametrize(
    "flags",
    [
        ("--quantization", "int8", "--kv-cache-dtype", "int8"),
        ("--quantization", "none", "--dtype", "bfloat16", "--cpu-kernels", "off"),
    ],
    ids=" ".join,
)
def test_number_formats_and_kernels(flags: tuple[str, ...]) -> None:
    with serve(*SMALL, *flags) as daemon:
        assert daemon.text(COUNT, max_tokens=4).startswith(" 5")


def test_float32(in_float32: tuple[str, str]) -> None:
    assert in_float32[0].startswith(" 5")


@pytest.mark.parametrize("method", ["suffix", "model"])
def test_drafts_change_no_text(method: str, in_float32: tuple[str, str]) -> None:
    draft = {"method": method} if method == "suffix" else {"model": find_model(None).path, "quantization": "gguf"}
    drafting = ("--speculative-config", json.dumps({**draft, "num_speculative_tokens": 3}))
    with serve(*IN_FLOAT32, *drafting, program="tests.free_drafts") as daemon:
        assert daemon.text(REPETITIVE, **LONGER) == in_float32[1]
        assert daemon.metric("quire_spec_decode_num_accepted_tokens_total") > 0


def test_beam_search_answers_best_first(default: Daemon) -> None:
    answer = default.complete(use_beam_search=True, n=3, max_tokens=6)
    assert len({choice["text"] for choice in answer["choices"]}) == 3


def test_a_tuned_file_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tiny model, and of few steps: how they are timed is another test's matter."""
    file, model = tmp_path / "quire.yaml", tmp_path / "model"
    model.mkdir()
    save_servable(CASES["llama"], model)
    monkeypatch.setattr("loadtest.tuning.probe._NUM_TIMED", (2, 2))
    flags = (str(model), "--max-model-len", "64", "--kv-cache-memory-bytes", "256KiB")
    assert cli.main(["tune", "--context", "24", "--block-sizes", "16", "-o", str(file), "--", *flags]) == 0
    found = yaml.safe_load(file.read_text())
    assert found["kv-cache-memory-bytes"] == 256 << 10
    with serve(model, "--config", file) as daemon:
        assert daemon.metric("quire_config_info", max_num_seqs=str(found["max-num-seqs"]), block_size="16") == 1
