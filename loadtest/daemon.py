"""Runs a real or fake daemon for a benchmark, on a free port of the loopback."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from loadtest.peers.process import Command, free_port, running

_START_LIMIT_S = 180.0
_ANSWER_LIMIT_S = 120.0
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? ([-+.\deE]+)$", re.MULTILINE)


class Daemon(NamedTuple):
    """A running daemon."""

    port: int
    pid: int


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


def get_json(port: int, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Return the JSON of a GET, or of a POST with a body."""
    return json.loads(_get(port, path, None if body is None else json.dumps(body).encode()))


def samples(port: int, name: str) -> list[tuple[str, float]]:
    """Return the labels and values of a metric's samples."""
    found = _SAMPLE.findall(_get(port, "/metrics"))
    return [(labels, float(value)) for metric, labels, value in found if metric == name]


def total(port: int, name: str) -> int:
    """Return the sum of a metric's samples."""
    return int(sum(value for _, value in samples(port, name)))


def _get(port: int, path: str, body: bytes | None = None) -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_ANSWER_LIMIT_S) as answer:  # noqa: S310
        return str(answer.read().decode())
