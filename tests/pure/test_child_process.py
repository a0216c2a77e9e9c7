"""A process that may be killed: whatever becomes of it is one error for its question, and the next has another."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.system import child_process
from engine.system.child_process import ChildCrashError, ChildLostError, ChildProcess, ChildTimeoutError

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChildProcess]:
    monkeypatch.setattr(child_process, "_ROOT", ROOT / "tests" / "pure")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made = ChildProcess("child_module", limit_s=WAIT_S)
    yield made
    made.close()


def ask(child: ChildProcess, *parts: bytes) -> list[bytes]:
    return [bytes(part) for part in child.ask([bytearray(part) for part in parts])]


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_parts_come_and_go_whole(child: ChildProcess) -> None:
    large = bytes(range(256)) * 40_000
    assert ask(child, b"abc", b"", large) == [b"cba", b"", large[::-1]]
    pid = child.pid
    assert ask(child, b"print") == [b"tnirp"], "a stray print is no part of an answer"
    assert child.pid == pid


def test_what_was_sent_is_let_go_of(child: ChildProcess) -> None:
    part = bytearray(b"x" * (1 << 20))
    child.ask([part])
    assert not part


def test_a_child_that_takes_too_long_is_killed(child: ChildProcess) -> None:
    ask(child, b"x")
    pid, child._limit_s = child.pid, 0.2
    assert pid is not None
    with pytest.raises(ChildTimeoutError, match="longer than"):
        ask(child, b"hang")
    assert is_gone(pid)
    child._limit_s = WAIT_S
    assert ask(child, b"abc") == [b"cba"]


def test_a_child_that_takes_too_much_memory_ends(child: ChildProcess) -> None:
    with pytest.raises(ChildCrashError):
        ask(child, b"eat")
    assert ask(child, b"abc") == [b"cba"]


def test_a_child_has_so_much_cpu_time_for_each_question(child: ChildProcess) -> None:
    for _ in range(3):
        ask(child, b"spin 0.2")
    with pytest.raises(ChildCrashError):
        ask(child, b"spin 2")
    assert ask(child, b"abc") == [b"cba"]


def test_a_child_that_ends_or_is_killed_is_replaced(child: ChildProcess) -> None:
    with pytest.raises(ChildCrashError):
        ask(child, b"exit")
    ask(child, b"x")
    assert child.pid is not None
    killed = threading.Timer(0.2, os.kill, (child.pid, signal.SIGKILL))
    killed.start()
    with pytest.raises(ChildLostError):
        ask(child, b"hang")
    assert ask(child, b"abc") == [b"cba"]


def test_a_child_that_ends_before_it_is_ready_ends_by_no_question(
    child: ChildProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, limit_s, reason in (("CHILD_EXITS", WAIT_S, "ended with 3"), ("CHILD_HANGS", 0.2, "took longer")):
        monkeypatch.setattr(child_process, "_START_S", limit_s)
        monkeypatch.setattr(child_process, "_ENVIRONMENT", (*child_process._ENVIRONMENT, variable))
        with monkeypatch.context() as now:
            now.setenv(variable, "1")
            with pytest.raises(ChildLostError, match=f"^it could not be started: it {reason}"):
                ask(child, b"x")
    monkeypatch.setattr(child_process, "_START_S", WAIT_S)
    assert ask(child, b"abc") == [b"cba"]


def test_an_idle_child_ends(child: ChildProcess) -> None:
    child._idle_s = 0.1
    ask(child, b"x")
    give_up_s = time.monotonic() + WAIT_S
    while child.pid is not None:
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    assert ask(child, b"abc") == [b"cba"]


def test_a_child_gets_no_secret(child: ChildProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "hunter2")
    [environment] = ask(child, b"environment")
    assert "QUIRE_API_KEY" not in json.loads(environment)


def test_closing_ends_a_question_that_waits(child: ChildProcess) -> None:
    ask(child, b"x")
    pid = child.pid
    assert pid is not None
    threading.Timer(0.2, child.close).start()
    with pytest.raises(ChildLostError):
        ask(child, b"hang")
    assert is_gone(pid)
    with pytest.raises(ChildLostError, match="shutting down"):
        ask(child, b"x")
