"""A compared server as a process: awaited until it answers, watched, and gone with its children whatever happened."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from loadtest.__main__ import main
from loadtest.peers.process import Command, PeerError, free_port, running, session_members
from tests.patience import PATIENCE_S, eventually

# Answers completions in one chunk, some time after its start, and has a child that ignores SIGTERM.
SERVER = """
import http.server, json, os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(99)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "--interrupt" in sys.argv and asked["max_tokens"] == int(sys.argv[sys.argv.index("--interrupt") + 1]):
            os.kill(os.getppid(), 2)
            time.sleep(99)
        usage = {"prompt_tokens": 3, "completion_tokens": asked["max_tokens"]}
        self.send_response(200); self.end_headers()
        for event in ({"choices": [{"text": "a"}]}, {"choices": [{"text": "b", "finish_reason": "length"}], "usage": usage}):
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
time.sleep(0.3)
print("ready, child", child.pid, flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
BODY = {"prompt": "x", "max_tokens": 1}


def server(port: int) -> Command:
    return Command([sys.executable, "-c", SERVER, "--port", str(port)], {"SOME": "thing"})


def test_a_server_is_awaited_measured_and_gone_with_its_children(tmp_path: Path) -> None:
    port = free_port()
    with running(server(port), port, tmp_path / "log", BODY, PATIENCE_S) as process:
        assert process.ready_s > 0.3
        pid = int(re.search(r"child (\d+)", process.log_tail())[1])
        eventually(lambda: process.peak_rss_bytes > 10 << 20)  # two interpreters
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(process._process.pid, 0)
    assert pid not in session_members(process._process.pid)


def test_a_server_that_dies_is_quoted(tmp_path: Path) -> None:
    command = Command([sys.executable, "-c", "print('no such model'); raise SystemExit(3)"], {})
    with (
        pytest.raises(PeerError, match=r"status 3 while starting.\nno such model"),
        running(command, free_port(), tmp_path / "log", BODY, PATIENCE_S),
    ):
        pass


def test_a_server_that_never_answers_is_given_up_and_stopped(tmp_path: Path) -> None:
    command = Command([sys.executable, "-c", "import time; time.sleep(99)"], {})
    with (
        pytest.raises(PeerError, match=r"not ready within 0\.2 s"),
        running(command, free_port(), tmp_path / "log", BODY, 0.2),
    ):
        pass


def test_a_command_that_does_not_exist_is_a_sentence(tmp_path: Path) -> None:
    with (
        pytest.raises(PeerError, match="`/no/such/server` cannot be run"),
        running(Command(["/no/such/server"], {}), 1, tmp_path / "log", BODY, PATIENCE_S),
    ):
        pass


@pytest.fixture
def comparison(tmp_path: Path) -> list[str]:
    """A comparison whose Quire and vLLM are both the script above."""
    folder = tmp_path / "smollm2-135m" / "hf"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    executable = tmp_path / "bin" / "python"
    executable.parent.mkdir()
    (tmp_path / "server.py").write_text(SERVER)
    executable.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then echo 1.0; else exec {sys.executable} {tmp_path}/server.py "$@"; fi\n'
    )
    executable.chmod(0o755)
    who = ["--quire", str(executable), "--vllm", str(executable), "--only", "quire", "vllm"]
    what = ["--workloads", "distinct", "--others", "999", "--out", str(tmp_path / "out")]
    return ["compare", "--models-dir", str(tmp_path), *who, *what]


def test_a_whole_comparison(comparison: list[str], tmp_path: Path) -> None:
    assert main([*comparison, "--concurrency", "1", "2", "--rounds", "2"]) == 0
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [drive["peer"] for drive in document["drives"]] == ["quire", "vllm", "quire", "vllm"]
    for drive in document["drives"]:
        assert [point["num_requests"] for point in drive["points"]] == [8, 8]
        assert drive["ready_s"] > 0.3
        assert str(tmp_path) not in drive["command"]


def test_points_that_other_work_disturbs_are_left_out(comparison: list[str], tmp_path: Path) -> None:
    assert main([*comparison, "--concurrency", "1", "--rounds", "1", "--only", "quire", "--others", "-1"]) == 1
    [drive] = json.loads((tmp_path / "out" / "results.json").read_text())["drives"]
    assert not drive["points"]
    assert drive["failures"] == ["distinct x 1: left out, because other work disturbed it 3 times."]


@pytest.mark.parametrize("max_tokens", [1, 64], ids=["while a server starts", "while it is measured"])
def test_ctrl_c_leaves_figures_and_no_process(comparison: list[str], tmp_path: Path, max_tokens: int) -> None:
    flags = ["--concurrency", "1", "--rounds", "1", "--flags", f"vllm=--interrupt {max_tokens}"]
    assert main([*comparison, *flags]) == 130
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    assert document["is_interrupted"] is True
    assert document["drives"][0]["points"][0]["num_requests"] == 8
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in _read(path)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
