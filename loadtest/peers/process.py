"""Starts, watches and stops one server with all of its descendants.

A server leads a new session, so that its descendants are found by the session's number in /proc. A thread samples their
memory; everything else happens on the main thread.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from loadtest.errors import LoadtestError

_POLL_S = 0.1
_READY_POLL_S = 0.02  # a start is measured as well
_SAMPLE_S = 0.5
_STOP_LIMIT_S = 20.0
_LOG_LINES = 15


class PeerError(LoadtestError):
    """A server did not start or has died; the message ends with the end of its log."""


class Command(NamedTuple):
    """The command of a server, and variables that are added to the environment."""

    argv: Sequence[str]
    environ: Mapping[str, str]

    def __str__(self) -> str:
        return shlex.join([*(f"{key}={value}" for key, value in self.environ.items()), *self.argv])


class ServerProcess:
    """A running server; `ready_s` is the time until its first answer."""

    def __init__(self, command: Command, port: int, log: Path) -> None:
        self.command = command
        self.port = port
        self.log = log
        self.ready_s = 0.0
        self.peak_rss_bytes = 0
        self._stopping = threading.Event()
        with log.open("wb") as file:
            self._started = time.perf_counter()
            self._process = subprocess.Popen(  # noqa: S603 - the person's own command
                command.argv,
                env=os.environ | command.environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        _share_niceness(self._process.pid)
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    def wait_ready(self, body: Mapping[str, object], limit_s: float) -> None:
        """Request one token until the server answers. Raises PeerError."""
        while not _answers(self.port, body, self._started + limit_s - time.perf_counter()):
            if not self.is_alive():
                raise PeerError(f"it ended with status {self._process.returncode} while starting.\n{self.log_tail()}")
            if time.perf_counter() - self._started > limit_s:
                raise PeerError(f"it was not ready within {limit_s:g} s.\n{self.log_tail()}")
            time.sleep(_READY_POLL_S)
        self.ready_s = time.perf_counter() - self._started

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    @contextlib.contextmanager
    def watch_others(self) -> Iterator[list[float]]:
        """Yield a list that has, after the context, the cores that other work than this and the server's took."""
        shares: list[float] = []
        begun_s, before_s = time.perf_counter(), self._others_s()
        yield shares
        shares.append((self._others_s() - before_s) / (time.perf_counter() - begun_s))

    def _others_s(self) -> float:
        """Return the processor seconds of everything else on this machine, and of what runs beside it on the host."""
        ticks = Path("/proc/stat").read_text().split(maxsplit=9)[1:9] if Path("/proc/stat").exists() else [0] * 8
        user, nice, system, _, _, irq, softirq, steal = map(int, ticks)
        own = sum(_ticks(pid) for pid in (os.getpid(), *session_members(self._process.pid)))
        return (user + nice + system + irq + softirq + steal - own) / os.sysconf("SC_CLK_TCK")

    def log_tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(line[:300] for line in lines[-_LOG_LINES:])

    def stop(self) -> None:
        """Send SIGTERM, then SIGKILL to the rest of the session; a second Ctrl-C waits."""
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._stop()
        finally:
            signal.signal(signal.SIGINT, previous)

    def _stop(self) -> None:
        if self.is_alive():
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_LIMIT_S)
        if self.is_alive():
            self._process.kill()
        self._process.wait()
        while members := session_members(self._process.pid):
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S / 10)  # the kernel needs a moment
        self._stopping.set()
        self._sampler.join()

    def _sample(self) -> None:
        while not self._stopping.wait(_SAMPLE_S):
            resident = sum(rss_bytes(pid) for pid in session_members(self._process.pid))
            self.peak_rss_bytes = max(self.peak_rss_bytes, resident)


@contextlib.contextmanager
def running(
    command: Command, port: int, log: Path, first_body: Mapping[str, object], limit_s: float
) -> Iterator[ServerProcess]:
    """Run a server from its first answer until the context ends. Raises PeerError."""
    try:
        server = ServerProcess(command, port, log)
    except OSError as error:
        raise PeerError(f"`{command.argv[0]}` cannot be run: {error.strerror}.") from None
    try:
        server.wait_ready(first_body, limit_s)
        yield server
    finally:
        server.stop()


def _share_niceness(pid: int) -> None:
    """Give a new session, which Linux schedules as a group, the niceness of this one."""
    with contextlib.suppress(OSError):
        _, _, niceness = Path("/proc/self/autogroup").read_text().rpartition("nice ")
        Path(f"/proc/{pid}/autogroup").write_text(niceness)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def session_members(session: int) -> list[int]:
    """Return the living processes of a session, from /proc."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of_session = stat.read_text().rpartition(") ")[2].split(" ", 4)[:4]
        except OSError:  # it has just ended
            continue
        if int(of_session) == session and state != "Z":
            members.append(int(stat.parent.name))
    return members


def rss_bytes(pid: int) -> int:
    """Return resident memory; pages that two processes share count twice."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _ticks(pid: int) -> int:
    """Return the processor time of a process and its ended children."""
    try:
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:15]))
    except OSError:  # it has ended, or this is no Linux
        return 0


def _answers(port: int, body: Mapping[str, object], limit_s: float) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=max(limit_s, 1.0))
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return answer.status == 200
