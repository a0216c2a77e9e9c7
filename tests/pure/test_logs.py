"""How log lines look, and the start-up story that they tell."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading

import pytest

from engine.core.types import Progress
from engine.system.progress import StartupProgress
from server.telemetry.logs import JsonFormatter, TextFormatter, configure_logging


def record(message: str, error: Exception | None = None, **extra: object) -> logging.LogRecord:
    exc_info = None
    if error is not None:
        try:
            raise error
        except Exception:
            exc_info = sys.exc_info()
    return logging.getLogger("quire.test").makeRecord(
        "quire.test", logging.INFO, "file.py", 1, message, (), exc_info, extra=extra
    )


def test_extras_become_keys() -> None:
    line = json.loads(JsonFormatter(tracebacks=False).format(record("done", num_tokens=3, route="/v1/completions")))
    assert line.pop("time").endswith("+00:00")
    assert line == {"level": "info", "logger": "quire.test", "message": "done", "num_tokens": 3, "route": "/v1/completions"}  # fmt: skip


@pytest.mark.parametrize("formatter", [TextFormatter, JsonFormatter])
def test_an_exception_is_one_line_unless_tracebacks_are_wanted(
    formatter: type[TextFormatter | JsonFormatter],
) -> None:
    failed = record("a step failed", ValueError("no such block"))
    short = formatter(tracebacks=False).format(failed)
    assert "a step failed: ValueError: no such block" in short
    assert "\n" not in short
    assert "Traceback" not in short
    assert "Traceback" in formatter(tracebacks=True).format(failed)


@pytest.mark.parametrize("show_bars", [True, False])
def test_each_stage_is_one_line_when_it_is_done(caplog: pytest.LogCaptureFixture, show_bars: bool) -> None:
    caplog.set_level(logging.INFO, logger="quire.startup")
    with StartupProgress(show_bars=show_bars) as startup:
        for done in (0, 1 << 20, 3 << 19, 3 << 20):
            startup.report(Progress("weights", "a.tensor", done, 3 << 20, "bytes"))
        startup.report(Progress("kv_pool", "64 blocks"))
        startup.report(Progress("graphs", "", 4, 4, "sizes"))
    assert caplog.messages == ["weights: 3.0 MiB of 3.0 MiB", "kv pool: 64 blocks", "graphs: 4 of 4 sizes"]


def test_what_libraries_write_has_the_form_of_all_lines() -> None:
    """In a new process: transformers and the hub's library add their handlers when they are imported."""
    code = """
import logging, warnings
from server.telemetry.logs import configure_logging
configure_logging("info", "json")
for name in ("transformers", "huggingface_hub"):
    library = logging.getLogger(name)
    library.addHandler(logging.StreamHandler())
    library.propagate = False
    logging.getLogger(name + ".part").warning("one\\ntwo")
warnings.warn("three")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in ran.stderr.splitlines()]
    assert [line["logger"] for line in lines] == ["transformers.part", "huggingface_hub.part", "py.warnings"]
    assert lines[0]["message"] == "one\ntwo"
    assert "UserWarning: three" in lines[2]["message"]


def test_an_error_that_ends_a_thread_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    configure_logging("info", "text")
    thread = threading.Thread(target=lambda: {}["missing"], name="quire-example")
    thread.start()
    thread.join()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("The thread quire-example ended (please report this): KeyError: 'missing'")
