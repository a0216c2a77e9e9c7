"""LiteLLM as a client of its `openai/` and `hosted_vllm/` providers. `make clients` installs it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from tests.documents.pages import ADDRESS
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("litellm") is None, reason="LiteLLM is not installed: make clients"),
]
PAGE = Path(__file__).parents[2] / "docs/integrations/litellm.md"
QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]


class City(BaseModel):
    name: str


@pytest.fixture
def ask(base_url: str) -> dict[str, Any]:
    ask = {"model": "openai/smol", "api_base": base_url, "api_key": "none", "messages": QUESTION, "temperature": 0}
    return {**ask, "max_tokens": 60, "max_retries": 0}


def test_answers_and_streams(ask: dict[str, Any]) -> None:
    import litellm

    text = litellm.completion(**ask).choices[0].message.content
    assert text
    stream = litellm.completion(**ask, stream=True, stream_options={"include_usage": True})
    built = litellm.stream_chunk_builder(list(stream))
    assert built.choices[0].message.content == text
    assert built.usage.completion_tokens > 0
    assert litellm.completion(**{**ask, "model": "hosted_vllm/smol"}).choices[0].message.content == text


def test_a_schema_is_kept(ask: dict[str, Any]) -> None:
    import litellm

    answer = litellm.completion(**ask, response_format=City)
    assert City.model_validate_json(answer.choices[0].message.content)


def test_errors_are_its_own(ask: dict[str, Any]) -> None:
    import litellm

    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**ask, "model": "openai/gpt-9"})
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**{**ask, "temperature": 9})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**ask, "messages": [{"role": "user", "content": "word " * 3000}]})


def test_the_page_s_code_runs(base_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    code = code.replace(f"{ADDRESS}/v1", base_url).replace("SmolLM2-135M-Instruct", "smol")
    exec(compile(code, str(PAGE), "exec"), {})
    assert "Tokyo" in capsys.readouterr().out


def test_the_page_s_proxy_starts_and_answers(base_url: str, tmp_path: Path) -> None:
    (config,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    config = config.replace(f"{ADDRESS}/v1", base_url).replace("SmolLM2-135M-Instruct", "smol")
    (tmp_path / "config.yaml").write_text(config)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        Path(sys.executable).parent / "litellm",
        "--config",
        "config.yaml",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    key = "sk-" + "0123456789abcdef" * 4
    with (tmp_path / "log").open("wb") as log:
        environ = {**os.environ, "LITELLM_MASTER_KEY": key}
        proxy = subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=log, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, trust_env=False) as http:
            ends_s = time.monotonic() + PATIENCE_S
            while not _is_ready(http):
                assert proxy.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < ends_s
                time.sleep(0.2)
            body = {"model": "local", "messages": QUESTION, "temperature": 0}
            answer = http.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}).json()
        assert "Tokyo" in answer["choices"][0]["message"]["content"]
    finally:
        proxy.kill()
        proxy.wait()


def _is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/health/readiness").status_code == 200
    except httpx.TransportError:
        return False
