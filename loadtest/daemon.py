"""A real daemon for a benchmark: started with given flags on a free port of the loopback, stopped at the end."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from loadtest.errors import LoadtestError

_START_LIMIT_S = 180.0


class DaemonError(LoadtestError):
    """The daemon did not start; one sentence."""


@contextlib.contextmanager
def daemon(flags: Sequence[str], tree: Path | None = None) -> Iterator[int]:
    """The port of a `quire serve` with these flags, from ready to stopped. Raises DaemonError.

    `tree` is another checkout of the code, to be compared with this one.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    command = [sys.executable, "-m", "server", "serve", *flags, "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=tree)  # noqa: S603 - our own command
        try:
            deadline = time.monotonic() + _START_LIMIT_S
            while not _is_ready(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise DaemonError(f"`{' '.join(command)}` did not start: {log.read().decode()[-500:]}")
                time.sleep(0.2)
            yield port
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
