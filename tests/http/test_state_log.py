"""Log lines as JSON against docs/observe/logs.md, and the state that SIGUSR1 logs."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_cli import LONG, outcome, quire, ready

import server
from engine.core.stats import SequenceView, Snapshot
from server.telemetry.logs import JsonFormatter, TextFormatter
from server.telemetry.state import _of_snapshot, log_state
from tests.http.harness import Live, eventually

Serve = Callable[..., Live]
PAGE = (Path(__file__).parents[2] / "docs/observe/logs.md").read_text(encoding="utf-8")
TYPES = {"string": str, "integer": int, "number": (int, float), "object": dict}


def check_line(line: dict[str, Any]) -> None:
    """Every field is on the page, with its type."""
    kinds = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", PAGE, re.MULTILINE))
    assert list(line)[:4] == ["time", "level", "logger", "message"]
    for name, value in line.items():
        assert name in kinds, f"docs/observe/logs.md has no field {name}"
        assert isinstance(value, TYPES[kinds[name]]), name


def check_state(state: dict[str, Any]) -> None:
    rows = re.findall(r"^\| (`[^|]+`) \| [^|]+ \|$", PAGE[PAGE.index("field of `state`") :], re.MULTILINE)
    assert set(state) <= {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert any("log_state" in frame for thread in state["threads"] for frame in thread["stack"])


def logged(live: Live, caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    caplog.set_level(logging.INFO, logger="quire.state")
    asyncio.run(log_state(live.context))
    return next(record for record in caplog.records if record.name == "quire.state")


def test_lines_have_the_fields_of_the_page_and_a_signal_logs_the_state() -> None:
    with quire("serve", "--log-format", "json", "--shutdown-timeout", "0", FAKE_STEP_S="0.02") as process:
        url = ready(process)
        httpx.post(f"{url}/v1/completions", json={"prompt": "secretive", "max_tokens": 3})
        httpx.post(f"{url}/v1/completions", json={"prompt": 7})
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"prompt": "secretive"}) as response:
            chunks = response.iter_lines()
            next(chunks)
            process.send_signal(signal.SIGUSR1)
            assert process.stderr is not None
            lines = []
            while not lines or "state" not in lines[-1]:
                lines.append(json.loads(process.stderr.readline()))
        process.send_signal(signal.SIGTERM)
        status, rest = outcome(process)
    assert status == 0
    lines += map(json.loads, rest.splitlines())
    for line in lines:
        check_line(line)
    assert "secretive" not in str(lines)
    [state] = [line["state"] for line in lines if "state" in line]
    check_state(state)
    assert (state["running"], state["open_requests"], state["is_alive"]) == (1, 1, True)
    [sequence] = state["sequences"]
    assert sequence["request_id"] == response.headers["x-request-id"]
    assert sequence["age_s"] > 0


def test_waiting_sequences_that_are_not_listed_are_counted() -> None:
    """A snapshot has no more waiting sequences than may run."""
    running = SequenceView(1, "a", "", 0, "running", 4, 5, 4, 0, 0, 0.0, 0.1, 0.2, (7,))
    waiting = running._replace(seq_id=2, request_id="b", status="waiting", blocks=())
    snapshot = Snapshot(9, 1, (), (running, waiting), ("b", "c", "d"))
    state = _of_snapshot(snapshot, {}, 1.0)
    assert (len(state["sequences"]), state["sequences_not_listed"]) == (2, 2)


def test_an_engine_that_hangs_is_reported_with_its_stack(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server.telemetry.live, "PATIENCE_S", 0.05)
    live = serve()
    live.gate.close()
    with httpx.stream("POST", live.url + "/v1/completions", json={"prompt": "hello|", "stream": True}) as response:
        eventually(lambda: live.engine.health().busy)
        record = logged(live, caplog)
        live.gate.open()
        response.read()
    state = record.__dict__["state"]
    check_state(state)
    assert "did not answer" in state["engine_does_not_answer"]
    stacks = [thread["stack"] for thread in state["threads"] if thread["name"] == "quire-engine"]
    assert any("fake_runner" in frame for stack in stacks for frame in stack)


def test_as_text_the_state_is_indented_below_its_line(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    record = logged(live, caplog)
    first, *below = TextFormatter(tracebacks=False).format(record).splitlines()
    assert first.endswith("state of the engine and of all threads")
    assert json.loads("\n".join(below)) == json.loads(JsonFormatter(tracebacks=False).format(record))["state"]
