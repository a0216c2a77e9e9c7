"""A daemon whose model is divided between two processes: the same answers, and one end for both."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from real_daemon import SMALL, Daemon, serve

from tests.cpu.test_rank_processes import workers
from tests.patience import eventually

FLAGS = (*SMALL, "--dtype", "float32", "--num-threads", "1")
RANKS = (*FLAGS, "--tensor-parallel-size", "2")


def answers(daemon: Daemon) -> list[str]:
    """Return a greedy answer and a drawn one."""
    return [daemon.text(), daemon.text(temperature=0.8, seed=7)]


def is_gone(pid: int) -> bool:
    """Return whether a process has ended, though nothing may have reaped it yet."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_two_ranks_answer_as_one_and_drain() -> None:
    with serve(*FLAGS) as daemon:
        alone = answers(daemon)
        assert "ranks" not in daemon.written
    with serve(*RANKS) as daemon:
        assert answers(daemon) == alone
        assert "ranks: 2 processes" in daemon.written
        assert daemon.http.get("/server_info").json()["tp_size"] == 2
        [worker] = workers(daemon.pid)
        body = {"prompt": "Once", "max_tokens": 64, "ignore_eos": True, "stream": True}
        with daemon.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(daemon.pid, signal.SIGTERM)  # the other rank has to compute the rest
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    eventually(lambda: is_gone(worker))


def test_a_killed_rank_ends_streams_and_the_daemon() -> None:
    with serve(*RANKS) as daemon:
        [worker] = workers(daemon.pid)
        body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with daemon.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(worker, signal.SIGKILL)
            rest = [line for line in lines if line]
        assert "error" in json.loads(rest[-2].removeprefix("data: "))
        assert rest[-1] == "data: [DONE]"
        daemon.status = 1
        daemon.wait()
    assert "rank 1 of the model ended (signal 9)" in daemon.written
    assert is_gone(worker)
