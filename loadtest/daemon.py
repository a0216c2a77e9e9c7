"""Runs a real or fake daemon for a benchmark, on a free port of the loopback."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from loadtest.peers.process import Command, free_port, running

_START_LIMIT_S = 180.0


class Daemon(NamedTuple):
    """A running daemon."""

    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def daemon(flags: Sequence[str]) -> Iterator[int]:
    """Run `quire serve` with these flags and yield its port. Raises PeerError."""
    with _daemon("server", "serve", *flags) as started:
        yield started.port


def fake_daemon(*arguments: str) -> contextlib.AbstractContextManager[Daemon]:
    """Run loadtest.fake_server. Raises PeerError."""
    return _daemon("loadtest.fake_server", *arguments)


@contextlib.contextmanager
def _daemon(*module: str) -> Iterator[Daemon]:
    port = free_port()
    command = Command([sys.executable, "-m", *module, "--port", str(port)], {})
    with (
        tempfile.TemporaryDirectory() as folder,
        running(command, port, Path(folder) / "log", {"prompt": "x", "max_tokens": 1}, _START_LIMIT_S) as server,
    ):
        yield Daemon(port, server.pid)


def get(port: int, path: str) -> str:
    """Return the body of a GET."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return str(answer.read().decode())
