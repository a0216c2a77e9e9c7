"""Runs the commands and the code of the documents as they are printed, against one daemon with the default model."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.sources.model_source import find_model
from tests.daemon.real_daemon import serve
from tests.documents.pages import ADDRESS, PAGES, ROOT, Block, blocks, commands, name_of
from tests.forked import Forked
from tests.patience import PATIENCE_S

README = (ROOT / "README.md").read_text(encoding="utf-8")
MODEL = "SmolLM2-135M-Instruct"
WIDTH, RANK = 576, 4  # of the default model, and of the adapter that pages name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapter `french`, made of small numbers."""
    folder = tmp_path_factory.mktemp("documents")
    (folder / "french").mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "french/adapter_config.json").write_text(json.dumps(config))
    sides = {"A": (RANK, WIDTH), "B": (WIDTH, RANK)}
    tensors = {
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight": np.full(shape, 0.001, np.float32)
        for side, shape in sides.items()
    }
    save_file(tensors, folder / "french/adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """A daemon with the model that comes with the installation."""
    (folder / "model.Q4_K_M.gguf").symlink_to(find_model(None).path)
    (folder / "config.yaml").write_text(f"max-num-seqs: 48\nserved-model-name: [{MODEL}]\n")
    flags = ["--config", folder / "config.yaml", "--kv-cache-memory-bytes", "128MiB"]
    flags += ["--data-dir", folder / "data", "--lora-modules", f"french={folder / 'french'}"]
    with serve(folder / "model.Q4_K_M.gguf", *flags, QUIRE_MAX_MODEL_LEN="2048") as daemon:
        yield daemon.url


@pytest.fixture(scope="module")
def shell(folder: Path) -> dict[str, str]:
    """Variables for a shell whose `quire` is this tree's, and whose `curl` fails on errors."""
    programs = folder / "bin"
    programs.mkdir()
    quire = f'#!/bin/sh\nexec "{sys.executable}" -m server "$@"\n'
    curl = f'#!/bin/sh\nexec "{shutil.which("curl")}" --silent --show-error --fail-with-body "$@"\n'
    for name, text in (("quire", quire), ("curl", curl)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    path = f"{programs}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    return {**kept, "PATH": path, "PYTHONPATH": str(ROOT)}


def is_run(block: Block) -> bool:
    """Return whether a shell block is run here: it has no reason against it, and starts and installs nothing."""
    starts = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:quire (?:serve|bench|tune|calibrate)|make)\b")
    return not block.reason and not any(starts.search(command) for command in commands(block.text))


def with_commands(page: Path) -> bool:
    return any(is_run(block) for block in blocks(page, "bash", "sh"))


def with_code(page: Path) -> bool:
    return page.name != "CONTRIBUTING.md" and any(not block.reason for block in blocks(page, "python"))


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("page", [page for page in PAGES if with_commands(page)], ids=name_of)
def test_the_commands_of_a_page_run(page: Path, url: str, shell: dict[str, str], tmp_path: Path) -> None:
    parts = [block for block in blocks(page, "bash", "sh") if is_run(block)]
    script = "set -eo pipefail\n" + "\n".join(f"echo '# {block}' >&2\n{block.text}" for block in parts)
    done = subprocess.run(
        ["bash", "-c", script.replace(ADDRESS, url)],
        cwd=tmp_path,
        env=shell,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    for expected in re.findall(r"<!-- answers: ([^\n]*) -->", page.read_text(encoding="utf-8")):
        assert expected in done.stdout, f"{expected!r} is not in {done.stdout}"


@pytest.mark.parametrize("page", [page for page in PAGES if with_code(page)], ids=name_of)
def test_the_code_of_a_page_runs(page: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written = ""
    for block in blocks(page, "python"):
        if block.reason:
            continue
        for name in re.findall(r"^(?:from|import) (\w+)", block.text, re.MULTILINE):
            if find_spec(name) is None:
                pytest.skip(f"needs {name}")
        code = block.text.replace(ADDRESS, url)
        written += in_a_process(code, tmp_path) if "from quire import" in code else here(code, str(block))
    for expected in re.findall(r"<!-- prints: ([^\n]*) -->", page.read_text(encoding="utf-8")):
        assert expected in written, f"{expected!r} is not in {written}"


def here(code: str, name: str) -> str:
    """Run code, which may import large clients that other pages import too; return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as written, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(code, name, "exec"), {"__name__": "__main__"})
    return written.getvalue()


def in_a_process(code: str, folder: Path) -> str:
    """Run code that loads a model, in a folder; return what it prints."""
    program, written = folder / "page.py", folder / "written.txt"
    program.write_text(f"import sys\n\nsys.stdout = open({str(written)!r}, 'w')\n{code}")
    process = Forked(str(program), (), folder, {**os.environ, "PYTHONPATH": str(ROOT)})
    _, errors = process.communicate(PATIENCE_S)
    assert process.returncode == 0, errors
    return written.read_text()


def post(url: str, path: str, **body: Any) -> httpx.Response:
    answer = httpx.post(f"{url}{path}", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer


TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
CHAT = {"messages": [{"role": "user", "content": "Say a word."}]}
YES = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes"]}}}
ENDPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "One, two,", "max_tokens": 3}),
    "chat": ("/v1/chat/completions", CHAT | {"max_tokens": 3}),
    "responses": ("/v1/responses", {"input": "Say a word.", "max_output_tokens": 16}),
    "messages": ("/v1/messages", CHAT | {"max_tokens": 3}),
    "embeddings": ("/v1/embeddings", {"input": "a word"}),
    "scores": ("/v1/score", {"text_1": "One, two,", "text_2": " three"}),
    "structured outputs": ("/v1/chat/completions", CHAT | {"max_tokens": 9, "response_format": YES}),
    "tool calls": ("/v1/chat/completions", CHAT | {"max_tokens": 60, "tools": [TOOL], "tool_choice": "required"}),
    "log probabilities": ("/v1/completions", {"prompt": "One,", "max_tokens": 2, "logprobs": 2}),
    "beam search": ("/v1/completions", {"prompt": "One,", "max_tokens": 2, "use_beam_search": True, "n": 2}),
    "lora adapters": ("/v1/completions", {"model": "french", "prompt": "One,", "max_tokens": 2}),
}


@pytest.mark.parametrize("name", ENDPOINTS)
def test_an_endpoint_that_the_readme_names_answers(name: str, url: str) -> None:
    assert name in README.lower()
    path, body = ENDPOINTS[name]
    post(url, path, **body)


def test_the_page_is_served(url: str) -> None:
    assert "<html" in httpx.get(url, timeout=PATIENCE_S).text


def test_the_readme_s_comparison_is_true_of_quire(url: str) -> None:
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


def test_a_setting_is_a_flag_a_variable_and_a_key(url: str) -> None:
    """The daemon of this module is started with all three, and from a GGUF file."""
    base, _ = httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).json()["data"]
    assert (base["id"], base["max_model_len"]) == (MODEL, 2048)
    assert 'max_num_seqs="48"' in httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
