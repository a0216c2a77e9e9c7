"""OpenAI's client for Node. It is installed by `npm install --prefix tests/clients/node`, as .ci/run does where npm is."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

HERE = Path(__file__).parent / "node"
NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="needs Node: no node is installed (on Debian: apt-get install nodejs npm)")
@pytest.mark.skipif(
    not (HERE / "node_modules/openai").is_dir(),
    reason="needs OpenAI's client for Node: npm install --no-package-lock --prefix tests/clients/node",
)
def test_the_client_for_node(base_url: str) -> None:
    done = subprocess.run(
        [str(NODE), "client.mjs", base_url], cwd=HERE, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["plain"]
    assert told["plain"] == told["streamed"] == told["helped"]
    assert {**told["usage"], "prompt_tokens_details": None} == {**told["helped_usage"], "prompt_tokens_details": None}
    assert told["request_id"]
    assert told["finish_reason"] == "tool_calls"
    for weather in (told["parsed"], told["called"], *told["run"]):
        assert isinstance(weather["city"], str)
        assert isinstance(weather["days"], int)
    assert told["run"]
    assert told["bad"] == {"kind": "BadRequestError", "status": 400, "code": "invalid_value", "param": "temperature"}
    assert told["unknown"] == {"kind": "NotFoundError", "status": 404, "code": "model_not_found", "param": "model"}
    assert told["timeout"] == "APIConnectionTimeoutError"
    assert told["left"] == "chat.completion.chunk"
    assert told["idle"]
