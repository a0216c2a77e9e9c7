"""Two or more daemons of a fleet and the router in front of them, each a process on a free port."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from loadtest.daemon import get_json
from loadtest.fleet.routers import Routing
from loadtest.peers.process import Command, PeerError, ServerProcess, free_port

_START_LIMIT_S = 120.0
_POLL_S = 0.1


class Sizes(NamedTuple):
    """The settings of each daemon that the load depends on."""

    num_blocks: int
    block_size: int
    max_model_len: int
    num_threads: int = 1
    model: str = ""
    flags: Sequence[str] = ()

    def arguments(self) -> list[str]:
        """Return them as flags of `quire serve`."""
        return [
            *([self.model] if self.model else []),
            *("--num-threads", str(self.num_threads), "--num-gpu-blocks-override", str(self.num_blocks)),
            *("--block-size", str(self.block_size), "--max-model-len", str(self.max_model_len), *self.flags),
        ]


class Member:
    """One daemon of the fleet; it can be killed and started again on its port."""

    def __init__(self, flags: Sequence[str], log: Path) -> None:
        self.port = free_port()
        argv = [sys.executable, "-m", "server", "serve", "--port", str(self.port), *flags]
        self._command, self._log = Command(argv, {}), log
        self.process = self._start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _start(self) -> ServerProcess:
        return ServerProcess(self._command, self.port, self._log)

    def start_again(self) -> None:
        """Start a daemon that was killed."""
        self.process.stop()
        self.process = self._start()

    def wait_ready(self) -> None:
        """Return when it answers. Raises PeerError."""
        self.process.wait_ready({"prompt": "x", "max_tokens": 1}, _START_LIMIT_S)


class Fleet(NamedTuple):
    """Running daemons and their router."""

    members: Sequence[Member]
    router: ServerProcess
    metrics_port: int
    model: str

    @property
    def port(self) -> int:
        return self.router.port


@contextlib.contextmanager
def fleet(
    routing: Routing, sizes: Sizes, num: int, folder: Path, more: Sequence[Sequence[str]] = ()
) -> Iterator[Fleet]:
    """Run `num` daemons and a router; `more` are further flags of each daemon. Raises PeerError."""
    with ExitStack() as stack:
        members, events = [], [_new_events() for _ in range(num if routing.has_events else 0)]
        for place in range(num):
            published = events[place].arguments() if events else []
            flags = [*sizes.arguments(), *published, *(more[place] if more else ())]
            members.append(Member(flags, folder / f"daemon-{place}.log"))
            stack.callback(lambda member: member.process.stop(), members[-1])
        for member in members:
            member.wait_ready()
        model = str(get_json(members[0].port, "/v1/models")["data"][0]["id"])
        port, metrics_port = free_port(), free_port()
        if events:
            listening = _listening(members, events, model, sizes.block_size)
            routing = routing._replace(flags=[*listening, *routing.flags])
        command = routing.command(port, metrics_port, [member.url for member in members])
        try:
            router = ServerProcess(command, port, folder / "router.log")
        except OSError as error:
            raise PeerError(
                f"`{command.argv[0]}` cannot be run: {error.strerror}; name it with --router-bin."
            ) from None
        stack.callback(router.stop)
        router.wait_ready({"model": model, "prompt": "x", "max_tokens": 1}, _START_LIMIT_S)
        wait_for_workers(router, num)
        yield Fleet(members, router, metrics_port, model)


class Events(NamedTuple):
    """Where a daemon publishes KV events."""

    endpoint: str
    replay_endpoint: str

    def arguments(self) -> list[str]:
        """Return them as flags of `quire serve`."""
        return ["--kv-events-config", json.dumps({"enable_kv_cache_events": True, **self._asdict()})]


def _new_events() -> Events:
    return Events(f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}")


def _listening(members: Sequence[Member], events: Sequence[Events], model: str, block_size: int) -> list[str]:
    """Return vllm-router's flags for events; it finds only the events of daemons that describe vLLM's own settings."""
    flags = ["--kv-event-block-size", str(block_size), "--kv-event-model", model]
    for member, each in zip(members, events, strict=True):
        flags += ["--kv-event-source", f"{member.url}={each.endpoint}"]
        flags += ["--kv-event-replay-source", f"{member.url}={each.replay_endpoint}"]
    return flags


@contextlib.contextmanager
def scratch(keep: Path | None) -> Iterator[Path]:
    """Yield a folder for logs: the one to keep, or one that is removed."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def wait_for_workers(router: ServerProcess, num: int) -> None:
    """Return when the router has found every daemon; it may answer before that. Raises PeerError."""
    deadline = time.perf_counter() + _START_LIMIT_S
    while time.perf_counter() < deadline and router.is_alive():
        try:
            listed = get_json(router.port, "/workers")["workers"]
        except (urllib.error.HTTPError, KeyError, TypeError, ValueError):
            return  # it has no such list, and waits for its daemons before it answers
        if sum(bool(worker.get("is_healthy", True)) for worker in listed) >= num:
            return
        time.sleep(_POLL_S)
    raise PeerError(f"the router did not find its {num} daemons.\n{router.log_tail()}")
