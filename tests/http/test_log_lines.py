"""Log lines as JSON against docs/observe/logs.md, and the stacks that SIGUSR1 writes."""

from __future__ import annotations

import json
import logging
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_cli import LONG, outcome, quire, ready

from server.http import connection as connection_module
from server.http.middleware import RequestState
from server.protocol.errors import STATE, ApiError
from server.telemetry.logs import MAX_REFUSALS, JsonFormatter, LineBudget, TextFormatter
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


def test_lines_have_the_fields_of_the_page_and_a_signal_writes_the_stacks() -> None:
    with quire("serve", "--log-format", "json", "--shutdown-timeout", "0", FAKE_STEP_S="0.02") as process:
        url = ready(process)
        httpx.post(f"{url}/v1/completions", json={"prompt": "secretive", "max_tokens": 3})
        httpx.post(f"{url}/v1/completions", json={"prompt": 7})
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"prompt": "secretive"}) as response:
            chunks = response.iter_lines()
            next(chunks)
            process.send_signal(signal.SIGUSR1)
            assert process.stderr is not None
            written = ""
            while "loop.py" not in written:  # the engine's thread, beside the JSON lines
                written += process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        status, rest = outcome(process)
    assert status == 0
    lines = [json.loads(line) for line in (written + rest).splitlines() if line.startswith("{")]
    for line in lines:
        check_line(line)
    assert "secretive" not in str(lines)
    assert len(lines) > 2


def lines_of(formatter: logging.Formatter, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what a terminal would show of the server's lines."""
    return [line for record in caplog.records for line in formatter.format(record).splitlines()]


@pytest.fixture
def at_info(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "server")
    return caplog


TENANTS = """
tenants:
  - {name: ann, key: ann-key, max_concurrent_requests: 1}
"""
REFUSING = "{{ raise_exception('no: ' + messages[0].content) }}"


def test_a_refused_request_is_one_line_with_code_sentence_path_and_tenant(
    serve: Serve, at_info: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "tenants.yaml").write_text(TENANTS, "utf-8")
    live = serve(tenants=tmp_path / "tenants.yaml", data_dir=tmp_path / "data", template=REFUSING, max_body_bytes=4096)
    secret = "secretive\n12:00:00 INFO    POST /forged 200"
    chat = {"messages": [{"role": "user", "content": secret}], "max_tokens": 4}
    asked: list[tuple[int, str, str, str, Any]] = [
        (400, "invalid_value", "POST", "/v1/chat/completions", chat),
        (400, "missing_required_parameter", "POST", "/v1/messages", {"messages": chat["messages"]}),
        (400, "invalid_type", "POST", "/v1/responses", {"input": secret, "temperature": secret}),
        (404, "model_not_found", "POST", "/v1/completions", {"prompt": secret, "model": "m\n\x1b[31m" + "m" * 900}),
        (413, "request_too_large", "POST", "/v1/completions", {"prompt": secret * 200}),
        (400, "unsupported_media_type", "POST", "/v1/files", None),
        (404, "batch_not_found", "GET", "/v1/batches/x%0A12:00:00%20INFO%20forged%E2%80%A8", None),
        (404, "not_found", "GET", "/%1b%5D0;x%0d%0a/" + "p" * 900, None),
    ]
    ann = {"authorization": "Bearer ann-key"}
    for status, code, method, path, body in asked:
        answer = httpx.request(method, live.url + path, json=body, headers=ann | {"x-request-id": code})
        assert answer.status_code == status, answer.text
    assert httpx.get(live.url + "/v1/models", headers={"authorization": "Bearer wrong-key"}).status_code == 401
    live.gate.close()
    with httpx.stream("POST", live.url + "/v1/completions", json={"prompt": "no end", "stream": True}, headers=ann):
        assert httpx.post(live.url + "/v1/completions", json={"prompt": secret}, headers=ann).status_code == 429
    expected = [(status, code, "ann") for status, code, *_ in asked] + [
        (401, "invalid_api_key", None), (429, "rate_limit_exceeded", "ann"),
    ]  # fmt: skip

    def refused() -> list[logging.LogRecord]:
        return [record for record in at_info.records if "code" in vars(record)]

    eventually(lambda: len(refused()) == len(expected))
    assert [(r.__dict__["status"], r.__dict__["code"], r.__dict__.get("tenant")) for r in refused()] == expected
    for formatter in (TextFormatter(tracebacks=False), JsonFormatter(tracebacks=False)):
        lines = lines_of(formatter, at_info)
        assert len(lines) == len(at_info.records), "a value began a line"
        assert all(line.isprintable() and len(line) < 2000 for line in lines)
        for hidden in ("secretive", "ann-key", "wrong-key"):
            assert hidden not in "".join(lines)
    for record in refused():
        line = json.loads(JsonFormatter(tracebacks=False).format(record))
        check_line(line)
        assert line["code"] in line["message"]
        assert line["error"] in line["message"]
        assert line["level"] == "info"


def test_bytes_that_are_no_request_are_a_line(
    live: Live, at_info: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_refusals", LineBudget(connection_module.logger))  # other tests use it too
    with socket.create_connection(("127.0.0.1", int(live.url.rpartition(":")[2]))) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        connection.recv(4096)
    [record] = [record for record in at_info.records if record.name == "server.http.connection"]
    assert re.match(r"no request 400, request '[0-9a-f]{32}', invalid_http: This is not", record.getMessage())


def test_a_flood_of_refused_requests_is_a_bounded_number_of_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flood")
    now = 0.0
    budget = LineBudget(logging.getLogger("flood"), lambda: now)
    assert sum(budget.take() for _ in range(1000)) == MAX_REFUSALS
    assert caplog.messages == []
    now = 1.0
    assert budget.take()
    assert caplog.messages == [f"{1000 - MAX_REFUSALS} more refused requests are not listed here"]
    now = 2.0
    assert budget.take()
    assert len(caplog.messages) == 1


def test_what_is_kept_of_a_refusal_holds_no_frame() -> None:
    """The frames of a traceback hold the body, which may have megabytes."""
    state = RequestState("r")
    try:
        raise ApiError(400, "invalid_value", "No.")
    except ApiError as error:
        error.response({"type": "http", STATE: state})
    assert state.error is not None
    assert state.error.message == "No."
    assert state.error.__traceback__ is None
