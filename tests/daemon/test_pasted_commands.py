"""Commands pasted from the documents of other servers start the real daemon, with the settings that people put into them."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from engine.settings.engine_config import EngineConfig
from engine.sources.model_source import find_model
from server.settings.flags import load_settings
from tests.daemon.real_daemon import ROOT, Daemon, serve
from tests.daemon.recipes import RECIPES, Recipe
from tests.patience import PATIENCE_S, eventually

MODEL = str(find_model(None).path)
HERE = ("--host", "127.0.0.1", "--port", "0")  # of these, a recipe may have others
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of Japan?"}], "max_tokens": 12}
TLS = Path(__file__).parent / "tls"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.command)
def test_a_recipe_is_understood_but_for_the_name_of_the_model(recipe: Recipe) -> None:
    argv = recipe.argv(MODEL)
    assert MODEL in argv
    settings = load_settings(argv)
    settings.check_together()
    assert isinstance(settings.engine_config(MODEL), EngineConfig)
    settings.app_config(MODEL, "m")


def renew(daemon: Daemon, certificate: Path) -> None:
    """Exchange the certificate, and have the daemon read it."""
    certificate.write_bytes((TLS / "second.pem").read_bytes())
    daemon._process.send_signal(signal.SIGHUP)
    eventually(lambda: "SIGHUP: read the certificate" in daemon.written)


def test_a_recipe_of_vllm_with_what_deployments_add_to_it_serves(tmp_path: Path) -> None:
    """TLS, a path before all routes, a key by vLLM's variable, defaults for all requests, no lines of requests."""
    certificate = tmp_path / "served.pem"
    certificate.write_bytes((TLS / "first.pem").read_bytes())
    recipe = next(each for each in RECIPES if "reasoning_outputs" in each.source)
    added = (
        *(
            "--ssl-certfile",
            certificate,
            "--root-path",
            "/llm",
            "--disable-log-requests",
            "--pipeline-parallel-size",
            "1",
        ),
        *("--override-generation-config", '{"temperature": 0, "max_new_tokens": 8}', "--num-gpu-blocks-override", "64"),
        *("--enable-force-include-usage", "--uvicorn-log-level", "error", "--disable-fastapi-docs"),
    )
    with serve(*recipe.argv(MODEL), *added, *HERE, VLLM_API_KEY="token-abc123") as daemon:
        address = str(daemon.http.base_url)
        assert address.startswith("https://")
        assert "no effect here: --pipeline-parallel-size 1 (" in daemon.written
        sampling = "sampling where a request names none: temperature 0, top_p 0.9, max_tokens 1024, max_new_tokens 8"
        assert sampling in daemon.written
        assert "kv pool: 64 blocks of 16 tokens" in daemon.written
        trusted = ssl.create_default_context(cafile=str(TLS / "first.pem"))
        headers = {"authorization": "Bearer token-abc123"}
        with httpx.Client(base_url=address, verify=trusted, headers=headers, timeout=PATIENCE_S) as client:
            assert client.get("/llm/health", headers={"authorization": ""}).status_code == 200
            assert (
                client.post("/llm/v1/chat/completions", json=QUESTION, headers={"authorization": ""}).status_code == 401
            )
            answers = [client.post("/llm/v1/chat/completions", json=QUESTION).json() for _ in range(2)]
            assert answers[0]["choices"] == answers[1]["choices"]  # greedy, although no request says so
            assert answers[0]["usage"]["completion_tokens"] <= 8
            assert client.post("/v1/chat/completions", json=QUESTION).status_code == 200  # a proxy may remove the path
            assert '"usage":{' in client.post("/llm/v1/chat/completions", json=QUESTION | {"stream": True}).text
            assert client.get("/llm/openapi.json").status_code == 404
        renew(daemon, certificate)
        with httpx.Client(verify=ssl.create_default_context(cafile=str(TLS / "second.pem"))) as renewed:
            assert renewed.get(f"{address}/llm/health", timeout=PATIENCE_S).status_code == 200
    assert "POST /v1/chat/completions" not in daemon.written


def test_a_recipe_of_llama_cpp_serves() -> None:
    recipe = next(each for each in RECIPES if "multiple users" in each.source)
    with serve(*recipe.argv(MODEL), "-ngl", "99", "--jinja", "--temp", "0", *HERE) as daemon:
        answer = daemon.http.post("/v1/chat/completions", json=QUESTION).json()
        assert answer["choices"][0]["message"]["content"] == "The capital of Japan is Tokyo."
        assert daemon.http.get("/v1/models").json()["data"][0]["max_model_len"] == 4096


WRONG = (
    (["--dtype", "float8"], "--dtype is 'float8'; choose one of auto, "),
    (["--max-model-len", "100000"], "--max-model-len is 100000, but the model was made for 8192 positions"),
    (["--ssl-certfile", "/none.pem"], "the certificate cannot be read from /none.pem: No such file"),
    (["--generation-config", "/none"], "it must be auto, vllm or a folder with generation_config.json"),
    (["--override-generation-config", '{"top_q": 1}'], "--override-generation-config has no key 'top_q'"),
    (["--override-generation-config", '{"top_p": "x"}'], "--override-generation-config: 'top_p' is 'x', not a number"),
    (["--hf-overrides", '{"hidden_size": "x"}'], "'hidden_size' is 'x'; Quire needs an integer"),
    ([], " on 127.0.0.1 is in use"),
)


def test_a_wrong_value_is_named_before_the_port_and_before_torch_is_imported() -> None:
    code = (
        "import json, sys\nfrom server.serve import main\n"
        "for argv in json.loads(sys.argv[1]):\n    assert main(argv) in (1, 2)\n"
        "print(sorted({'torch', 'transformers', 'fastapi'} & set(sys.modules)))"
    )
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        cases = json.dumps([[*argv, "--port", str(busy.getsockname()[1])] for argv, _ in WRONG])
        kept = {key: value for key, value in os.environ.items() if not key.startswith("QUIRE_")}
        command = [sys.executable, "-c", code, cases]
        done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    lines = done.stderr.splitlines()
    assert len(lines) == len(WRONG)
    for line, (_, sentence) in zip(lines, WRONG, strict=True):
        assert sentence in line
