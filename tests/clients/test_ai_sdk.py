"""AI SDK with its defaults, which refer to earlier answers by their ids. `make clients` installs it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

HERE = Path(__file__).parent / "agents"
NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None or not (HERE / "node_modules/ai").is_dir(), reason="needs AI SDK: make clients")
def test_a_second_turn_refers_to_the_first(base_url: str) -> None:
    command = [str(NODE), "ai_sdk.mjs", base_url]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["kinds"] == ["user", "item_reference", "user"]
    assert "Tokyo" in told["first"]
    assert "Paris" in told["second"]
