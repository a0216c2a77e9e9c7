"""The daemon as process 1 of a container, as Kubernetes ends it: readiness goes, open streams reach their last token."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import httpx
import pytest
from test_cli import LONG, outcome, quire, read_until, ready

from tests.patience import eventually

CONTAINER = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")


def process_1(outer: int) -> int:
    """Return the id, outside, of the process that `unshare` has made process 1 of a PID namespace."""
    return int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])


@pytest.mark.skipif(
    subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode != 0,
    reason="this machine forbids PID namespaces",
)
def test_from_sigterm_to_the_last_token() -> None:
    """Process 1 has no default action for signals, and nothing else reaps what it starts."""
    with quire("serve", "--shutdown-timeout", "600", around=CONTAINER) as process:
        url = ready(process)
        assert httpx.get(f"{url}/ready").status_code == 200
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(process_1(process.pid), signal.SIGTERM)
            read_until(process, r"(SIGTERM): finishing 1 open requests")
            eventually(lambda: httpx.get(f"{url}/ready").status_code == 503)
            assert httpx.get(f"{url}/health").status_code == 200  # a liveness probe must not kill what drains
            assert httpx.post(f"{url}/v1/completions", json=LONG).status_code == 503
            events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        status, written = outcome(process)
    assert status == 0
    assert "Traceback" not in written
