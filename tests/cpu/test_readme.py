"""What README promises, tried with the real commands: its examples as they are printed, its flags, endpoints and links."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.model_source import find_model
from tests.cpu.served_models import ROOT, save_servable, serving
from tests.cpu.test_models_families import CASES
from tests.patience import PATIENCE_S

README = (ROOT / "README.md").read_text(encoding="utf-8")
SMALL = ("--max-model-len", "2048", "--kv-cache-memory-bytes", "128MiB")


def blocks(language: str) -> list[str]:
    """README's examples in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def command(*argv: str) -> subprocess.CompletedProcess[str]:
    """`quire` with these arguments."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "server", *argv],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon with the model that comes with the installation."""
    with serving(*SMALL, "--data-dir", str(tmp_path_factory.mktemp("data"))) as address:
        yield address


def post(url: str, path: str, **body: Any) -> httpx.Response:
    answer = httpx.post(f"{url}{path}", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer


def run_python(code: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_curl_line_is_answered(url: str) -> None:
    (block,) = (text for text in blocks("") if "curl" in text)
    words = shlex.split(block.replace("\\\n", " "))
    body = json.loads(words[words.index("-d") + 1])
    path = re.sub(r"^http://[^/]*", "", words[1])
    assert "Tokyo" in post(url, path, **body).json()["choices"][0]["message"]["content"]


def test_the_example_with_the_sdk_runs(url: str) -> None:
    (code,) = (text for text in blocks("python") if "from openai" in text)
    assert "http://127.0.0.1:8000" in code
    assert len(run_python(code.replace("http://127.0.0.1:8000", url))) > 20


def test_the_example_without_http_runs() -> None:
    (code,) = (text for text in blocks("python") if "from quire" in text)
    assert "The capital of France is" in run_python(code)


def test_the_page_is_served(url: str) -> None:
    assert "<html" in httpx.get(url, timeout=PATIENCE_S).text


TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
CHAT = {"messages": [{"role": "user", "content": "Say a word."}]}
YES = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes"]}}}
ENDPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "One, two,", "max_tokens": 3}),
    "chat": ("/v1/chat/completions", CHAT | {"max_tokens": 3}),
    "responses": ("/v1/responses", {"input": "Say a word.", "max_output_tokens": 16}),
    "Anthropic's messages": ("/v1/messages", CHAT | {"max_tokens": 3}),
    "embeddings": ("/v1/embeddings", {"input": "a word"}),
    "scores": ("/v1/score", {"text_1": "One, two,", "text_2": " three"}),
    "structured outputs": ("/v1/chat/completions", CHAT | {"max_tokens": 9, "response_format": YES}),
    "tool calls": ("/v1/chat/completions", CHAT | {"max_tokens": 60, "tools": [TOOL], "tool_choice": "required"}),
    "log probabilities": ("/v1/completions", {"prompt": "One,", "max_tokens": 2, "logprobs": 2}),
    "beam search": ("/v1/completions", {"prompt": "One,", "max_tokens": 2, "use_beam_search": True, "n": 2}),
}


@pytest.mark.parametrize("name", ENDPOINTS)
def test_an_endpoint_that_is_named_answers(name: str, url: str) -> None:
    assert name.lower() in README.lower()
    path, body = ENDPOINTS[name]
    post(url, path, **body)


def test_files_and_batches_are_there(url: str) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "One,", "max_tokens": 1}}
    sent = httpx.post(
        f"{url}/v1/files", files={"file": ("a.jsonl", json.dumps(line))}, data={"purpose": "batch"}, timeout=PATIENCE_S
    )
    assert sent.status_code == 200, sent.text
    batch = post(
        url, "/v1/batches", input_file_id=sent.json()["id"], endpoint="/v1/completions", completion_window="24h"
    )
    assert batch.json()["status"] in ("validating", "in_progress", "finalizing", "completed")


def test_the_comparison_s_claims_about_requests(url: str) -> None:
    answer = post(url, "/v1/completions", prompt="One,", max_tokens=2, nonsense=1)
    assert answer.headers["x-quire-ignored-fields"] == "nonsense"
    state = httpx.get(f"{url}/v1/requests/{answer.headers['x-request-id']}", timeout=PATIENCE_S)
    assert state.status_code == 200, state.text
    assert httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200
    metrics = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
    bounds = [float(bound) for bound in re.findall(r'inter_token\w*_bucket\{[^}]*le="([\d.e-]+)"', metrics)]
    assert min(bounds) == 0.0001
    for promised in ("time_to_first_token", "time_per_output_token", "cache_usage"):
        assert promised in metrics, promised


def test_a_gguf_file_is_served_and_drafted_for(tmp_path: Path) -> None:
    (tmp_path / "model.Q4_K_M.gguf").symlink_to(find_model(None).path)
    drafts = json.dumps({"method": "ngram", "num_speculative_tokens": 2})
    with serving(str(tmp_path / "model.Q4_K_M.gguf"), *SMALL, "--speculative-config", drafts) as address:
        assert post(address, "/v1/completions", prompt="1 2 3 1 2 3", max_tokens=8).json()


def test_an_id_of_the_hub_is_served(tmp_path: Path) -> None:
    """From the hub's cache, as it lies there once it was downloaded."""
    repository = tmp_path / "hub" / "models--some--tiny"
    folder = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(folder.name)
    save_servable(CASES["qwen3"], folder)
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    with serving("some/tiny", "--kv-cache-memory-bytes", "4MiB", **offline) as address:
        assert post(address, "/v1/completions", prompt="w5 w7", max_tokens=4, model="some/tiny").json()


def test_a_setting_is_a_flag_a_variable_and_a_key(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("max-num-seqs: 3\nserved-model-name: [yaml]\n")
    flags = ("--config", str(tmp_path / "config.yaml"), "--kv-cache-memory-bytes", "64MiB")
    with serving(*flags, QUIRE_MAX_MODEL_LEN="512") as address:
        (model,) = httpx.get(f"{address}/v1/models", timeout=PATIENCE_S).json()["data"]
    assert (model["id"], model["max_model_len"]) == ("yaml", 512)


def test_help_is_one_page() -> None:
    done = command("serve", "--help")
    assert done.returncode == 0
    assert "--max-model-len" in done.stdout
    assert len(done.stdout.splitlines()) < 250


def test_bench_and_simulate_run(url: str, tmp_path: Path) -> None:
    for name in ("bench", "simulate"):
        assert f"`quire {name}`" in README
        assert command(name, "--help").returncode == 0
    done = command("simulate", "replay", "steady", "--num", "20")
    assert done.returncode == 0, done.stderr


def test_every_file_that_is_named_is_there() -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", README) + re.findall(r'(?:src|srcset)="([^"]+)"', README)
    links += re.findall(r"`((?:engine|server|loadtest|tests)/[\w/]+\.py)`", README)
    assert len(links) > 5
    for link in links:
        assert link.startswith("http") or (ROOT / link).exists(), link
