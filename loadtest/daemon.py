"""Starts a real or fake daemon for a benchmark on a free port of the loopback, and stops it at the end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from loadtest.errors import LoadtestError
from loadtest.peers.process import free_port

_START_LIMIT_S = 180.0


class DaemonError(LoadtestError):
    """The daemon did not start; one sentence."""


class Daemon(NamedTuple):
    """A running daemon."""

    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def daemon(flags: Sequence[str]) -> Iterator[int]:
    """Run `quire serve` with these flags and yield its port. Raises DaemonError."""
    with _running(["server", "serve", *flags]) as started:
        yield started.port


def fake_daemon(*arguments: str, core: int | None = None) -> contextlib.AbstractContextManager[Daemon]:
    """Run loadtest.fake_server, on one core if it is given. Raises DaemonError."""
    return _running(["loadtest.fake_server", *arguments], core)


@contextlib.contextmanager
def _running(module: Sequence[str], core: int | None = None) -> Iterator[Daemon]:
    started = Daemon(free_port(), 0)
    command = [sys.executable, "-m", *module, "--port", str(started.port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: S603 - our own command
        try:
            if core is not None:
                os.sched_setaffinity(process.pid, {core})
            deadline = time.monotonic() + _START_LIMIT_S
            while not _is_ready(started.port):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise DaemonError(f"`{' '.join(command)}` did not start: {log.read().decode()[-500:]}")
                time.sleep(0.1)
            yield started._replace(pid=process.pid)
        finally:
            process.terminate()
            process.wait()


def get(port: int, path: str) -> str:
    """Return the body of a GET."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return str(answer.read().decode())


def _is_ready(port: int) -> bool:
    try:
        get(port, "/ready")
    except OSError:
        return False
    return True
