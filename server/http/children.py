"""A process for work that may hang, explode or crash: it is killed when it takes too long, and started again when needed.

`Child` is the daemon's end, `serve` the process' own. Both send messages, lists of byte strings, over pipes: a count of
the parts, their sizes, and the parts themselves, so that nothing is escaped and nothing is unpickled. Standard library
only. POSIX only, as all of the daemon.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")  # no keys, no settings
_START_S = 60.0  # an interpreter on a machine that is busy with everything else
_SIZE_BYTES = 8
_PIECE_BYTES = 1 << 20

Parts = list[bytearray]


class ChildError(Exception):
    """The child gave no answer."""


class ChildTimeoutError(ChildError):
    """It took too long and was killed."""


class ChildCrashError(ChildError):
    """It ended by itself: its work took too much memory or stack."""


class ChildLostError(ChildError):
    """It could not be started, or was killed by another process."""


class Child:
    """A process that runs a module. Any thread may ask; one question is answered at a time."""

    def __init__(self, module: str, *, limit_s: float, idle_s: float = 60.0) -> None:
        """`module` calls `serve` when it is run. The process starts with the first question, ends when idle for `idle_s`."""
        self._module = module
        self._limit_s = limit_s
        self._idle_s = idle_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._used_s = 0.0
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The process' id while there is one."""
        process = self._process
        return None if process is None else process.pid

    def ask(self, question: Parts) -> Parts:
        """Send a message and return the answer. Each part is cleared once it is sent, so that nothing is held twice.

        Raises ChildError; a child that gave no answer is killed, and the next question starts another.
        """
        with self._lock:
            if self._is_closed:
                raise ChildLostError("the daemon is shutting down")
            process = self._process
            try:
                if process is None or process.poll() is not None:
                    process = self._start()
                pipes = _Pipes(process, self._limit_s)
                pipes.send(question)
                answer = pipes.receive()
            except BaseException:
                self._kill()
                raise
            self._used_s = time.monotonic()
            self._watch()
        return answer

    def close(self) -> None:
        """End the process for good; a question that waits for it fails."""
        self._is_closed = True
        process, timer = self._process, self._timer
        if process is not None:
            process.kill()
        with self._lock:
            self._kill()
        if timer is not None:
            timer.cancel()

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
                env=environment,
                start_new_session=True,  # a Ctrl-C is for the daemon, which may still be draining
            )
        except OSError as error:
            raise ChildLostError(f"it could not be started: {error.strerror}") from error
        self._process = process
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        _Pipes(process, _START_S).receive()  # an empty message: it is ready
        return process

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def _watch(self) -> None:
        """Have a timer end the process once it is idle."""
        if self._timer is None or not self._timer.is_alive():
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


class _Pipes:
    """The pipes of a process, for so many seconds."""

    def __init__(self, process: subprocess.Popen[bytes], limit_s: float) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._limit_s, self._deadline_s = limit_s, time.monotonic() + limit_s
        self._in, self._out = process.stdin.fileno(), process.stdout.fileno()

    def send(self, parts: Parts) -> None:
        """One message; clears its parts."""
        self._write(_head(parts))
        for part in parts:
            self._write(part)
            part.clear()

    def receive(self) -> Parts:
        """One message."""
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
        data = bytearray()  # it grows: to fill so many bytes with zeros would hold the GIL
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
        """Why the other end is gone."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return ChildLostError("it closed its pipes")
        if code in (-signal.SIGKILL, -signal.SIGTERM):
            return ChildLostError("it was killed")
        return ChildCrashError(f"it ended with {code}")


def serve(answer: Callable[[Parts], list[bytes]], *, memory: Callable[[int], int] | None = None) -> None:
    """Answer messages from standard input until it ends. `memory` is how much a message of so many bytes may take.

    A MemoryError or RecursionError ends the process: what is left of its memory cannot be relied on.
    """
    stdin, stdout = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # a stray print is no message
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    gc.collect()
    gc.freeze()
    gc.disable()  # messages are large and have no cycles; what errors leave is collected between them
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
        told = answer(parts)
        del parts
        gc.collect()
        if trim is not None:
            trim(0)
        _write_all(stdout, _head(told))
        told.reverse()
        while told:
            _write_all(stdout, told.pop())
        if trim is not None:
            trim(0)


def _limit_memory(more: int) -> None:
    """Let the process grow by so many bytes from now on, where Linux says how large it is."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))


def _head(parts: Sequence[bytes | bytearray]) -> bytes:
    """The count and the sizes of a message's parts."""
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
