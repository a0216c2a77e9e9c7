"""Runs work that may hang, explode or crash in a process that can be killed.

`ChildProcess` is the daemon's end, `serve` the process's. Both send messages, lists of byte strings, over pipes: a count
of the parts, their sizes, and the parts themselves, so nothing is escaped and nothing is unpickled. The process inherits
no keys and no settings. Standard library only; POSIX only, as the daemon is.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")  # no keys, no settings
_START_S = 60.0  # an interpreter and its set-up, on a busy machine
_SIZE_BYTES = 8
_PIECE_BYTES = 1 << 20

Parts = list[bytearray]
Ask = Callable[[Parts], Parts]


class ChildError(Exception):
    """The child gave no answer."""


class ChildTimeoutError(ChildError):
    """The child took too long and was killed."""


class ChildCrashError(ChildError):
    """The child ended by itself: its work took too much memory or stack."""


class ChildLostError(ChildError):
    """The child could not be started, or another process killed it."""


class ChildProcess:
    """A process that runs a module and answers one question at a time. Any thread."""

    def __init__(
        self,
        module: str,
        *,
        limit_s: float,
        idle_s: float = 60.0,
        set_up: Callable[[Ask], object] | None = None,
    ) -> None:
        """`module` calls `serve` when it is run.

        The process starts with the first question and ends when idle for `idle_s`.

        `set_up` asks each new process the questions that come before all others; whatever it raises, `ask` raises.
        """
        self._module = module
        self._limit_s = limit_s
        self._idle_s = idle_s
        self._set_up = set_up
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._used_s = 0.0
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The process id, while there is a process."""
        process = self._process
        return None if process is None else process.pid

    def ask(self, question: Parts) -> Parts:
        """Send a message and return the answer.

        Each part is cleared once it is sent, so that nothing is held twice.

        Raises ChildError; a child that gave no answer is killed, and the next question starts another.
        """
        with self._lock:
            process = self._process
            try:
                self._check_open()
                if process is None or process.poll() is not None:
                    process = self._start()
                answer = _Pipes(process, self._limit_s).ask(question)
            except BaseException:
                self._kill()
                raise
            self._used_s = time.monotonic()
            self._watch()
        return answer

    def close(self) -> None:
        """End the process for good; a question that waits for it fails. Idempotent."""
        self._is_closed = True
        process, timer = self._process, self._timer
        if process is not None:
            _kill_group(process)
        with self._lock:
            self._kill()
        if timer is not None:
            timer.cancel()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ChildLostError("the daemon is shutting down")

    def _start(self) -> subprocess.Popen[bytes]:
        self._kill()
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        try:
            process = subprocess.Popen(  # noqa: S603 - this program's own module
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd=_ROOT,
                env=environment | {"MALLOC_ARENA_MAX": "1"},  # each further arena counts as 64 MiB of address space
                start_new_session=True,  # Ctrl-C is for the daemon, which may still be draining
            )
        except OSError as error:
            raise ChildLostError(f"it could not be started: {error.strerror}") from error
        self._process = process
        self._check_open()  # `close` may have come before it could see the process
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        pipes = _Pipes(process, _START_S)
        pipes.receive()  # an empty message: it is ready
        if self._set_up is not None:
            self._set_up(pipes.ask)
        return process

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        _kill_group(process)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def _watch(self) -> None:
        """Have a timer end the process once it is idle."""
        if self._idle_s < math.inf and (self._timer is None or not self._timer.is_alive()):
            rest_s = max(self._used_s + self._idle_s - time.monotonic(), 0.0)
            self._timer = threading.Timer(rest_s, self._end_if_idle)
            self._timer.daemon = True
            self._timer.start()

    def _end_if_idle(self) -> None:
        with self._lock:
            self._timer = None
            if self._process is None:
                return
            if time.monotonic() - self._used_s >= self._idle_s:
                self._kill()
            else:
                self._watch()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its forks, unless it was reaped: its id may be reused."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class _Pipes:
    """The pipes of a process, usable for a limited time."""

    def __init__(self, process: subprocess.Popen[bytes], limit_s: float) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._limit_s, self._deadline_s = limit_s, time.monotonic() + limit_s
        self._in, self._out = process.stdin.fileno(), process.stdout.fileno()

    def ask(self, question: Parts) -> Parts:
        """Send a message, clearing its parts, and return the answer."""
        self._write(_head(question))
        for part in question:
            self._write(part)
            part.clear()
        return self.receive()

    def receive(self) -> Parts:
        """Return the next message."""
        [num] = _sizes(self._read(_SIZE_BYTES))
        return [self._read(size) for size in _sizes(self._read(num * _SIZE_BYTES))]

    def _write(self, part: bytes | bytearray) -> None:
        sent = 0
        while sent < len(part):
            self._await(self._in, select.POLLOUT)
            try:
                with memoryview(part) as view, view[sent : sent + _PIECE_BYTES] as piece:
                    sent += os.write(self._in, piece)
            except BrokenPipeError:
                raise self._ended() from None

    def _read(self, size: int) -> bytearray:
        data = bytearray()  # it grows: filling so many bytes with zeros would hold the GIL
        while len(data) < size:
            self._await(self._out, select.POLLIN)
            piece = os.read(self._out, min(size - len(data), _PIECE_BYTES))
            if not piece:
                raise self._ended()
            data += piece
        return data

    def _await(self, file: int, event: int) -> None:
        poll = select.poll()  # select itself knows no file beyond the 1024th
        poll.register(file, event)
        rest_s = self._deadline_s - time.monotonic()
        if rest_s <= 0 or not poll.poll(1000 * rest_s):
            raise ChildTimeoutError(f"it took longer than {self._limit_s:.0f} s")

    def _ended(self) -> ChildError:
        """Return why the other end is gone."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return ChildLostError("it closed its pipes")
        if code in (-signal.SIGKILL, -signal.SIGTERM):
            return ChildLostError("it was killed")
        return ChildCrashError(f"it ended with {code}")


def serve(answer: Callable[[Parts], list[bytes]], *, memory: Callable[[int], int] | None = None) -> None:
    """Answer messages from standard input until it ends.

    `memory` returns how much a message of so many bytes may take.

    A MemoryError or RecursionError ends the process: the rest of its memory cannot be relied on.
    """
    stdin, stdout = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # a stray print is not a message
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    gc.collect()
    gc.freeze()
    gc.disable()  # messages are large and have no cycles; garbage of errors is collected between them
    _write_all(stdout, _head([]))
    while True:
        head = _read_exactly(stdin, _SIZE_BYTES)
        if head is None:
            return
        sizes = _sizes(_read_exactly(stdin, _sizes(head)[0] * _SIZE_BYTES))
        if memory is not None:
            _limit_memory(memory(sum(sizes)))
        parts: Parts = []
        for size in sizes:
            part = _read_exactly(stdin, size)
            if part is None:
                return
            parts.append(part)
            del part
        answered = answer(parts)
        del parts
        gc.collect()
        if trim is not None:
            trim(0)
        _write_all(stdout, _head(answered))
        answered.reverse()
        while answered:
            _write_all(stdout, answered.pop())
        if trim is not None:
            trim(0)


def _limit_memory(more: int) -> None:
    """Let the process grow by so many bytes from now on, if its size is known."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))


def _head(parts: Sequence[bytes | bytearray]) -> bytes:
    """Return the count and the sizes of a message's parts."""
    return b"".join(size.to_bytes(_SIZE_BYTES, "little") for size in (len(parts), *map(len, parts)))


def _sizes(data: bytearray | None) -> list[int]:
    data = data or bytearray()
    return [int.from_bytes(data[at : at + _SIZE_BYTES], "little") for at in range(0, len(data), _SIZE_BYTES)]


def _read_exactly(file: int, size: int) -> bytearray | None:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        num = os.readv(file, [view[:_PIECE_BYTES]])
        if not num:
            return None
        view = view[num:]
    return data


def _write_all(file: int, part: bytes | bytearray) -> None:
    view = memoryview(part)
    while view:
        view = view[os.write(file, view[:_PIECE_BYTES]) :]
