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
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).resolve().parents[2]
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")  # no keys, no settings
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
        self, module: str, *, limit_s: float, idle_s: float = 60.0, set_up: Callable[[Ask], object] | None = None
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
                with _limited(process, self._limit_s):
                    answer = _ask(process, question)
            except BaseException:
                self._kill()
                raise
            self._used_s = time.monotonic()
            self._watch()
        return answer

    def interrupt(self) -> None:
        """Give up the question that is being answered, if one is: it fails with ChildLostError."""
        process = self._process
        if process is not None:
            _kill_group(process)

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
        try:
            with _limited(process, _START_S):
                _receive(process)  # an empty message: it is ready
                if self._set_up is not None:
                    self._set_up(partial(_ask, process))
        except (ChildCrashError, ChildTimeoutError) as error:  # no question is the reason
            raise ChildLostError(f"it could not be started: {error}") from error
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


@contextmanager
def _limited(process: subprocess.Popen[bytes], limit_s: float) -> Iterator[None]:
    """Kill the process after `limit_s`. Raises ChildError if it ends within the block."""
    is_late = threading.Event()

    def kill() -> None:
        is_late.set()
        _kill_group(process)

    timer = threading.Timer(limit_s, kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (BrokenPipeError, EOFError):
        raise (
            ChildTimeoutError(f"it took longer than {limit_s:.0f} s") if is_late.is_set() else _ending(process)
        ) from None
    finally:
        timer.cancel()


def _ending(process: subprocess.Popen[bytes]) -> ChildError:
    """Return why the other end is gone."""
    try:
        code = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return ChildLostError("it closed its pipes")
    if code in (-signal.SIGKILL, -signal.SIGTERM):
        return ChildLostError("it was killed")
    return ChildCrashError(f"it ended with {code}")


def _ask(process: subprocess.Popen[bytes], question: Parts) -> Parts:
    """Send a message, clearing its parts, and return the answer."""
    assert process.stdin is not None
    _write(process.stdin.fileno(), _head(question))
    for part in question:
        _write(process.stdin.fileno(), part)
        part.clear()
    return _receive(process)


def _receive(process: subprocess.Popen[bytes]) -> Parts:
    """Return the next message. Raises EOFError."""
    assert process.stdout is not None
    file = process.stdout.fileno()
    return [_read(file, size) for size in _read_head(file)]


class Limits(NamedTuple):
    """What a message may take, in all and for each of its bytes; the kernel ends a process that takes more."""

    memory: int  # bytes, beyond those that the process has
    memory_per_byte: float
    cpu_s: float = 0.0  # 0: any
    cpu_s_per_byte: float = 0.0


def serve(
    answer: Callable[[Parts], list[bytes]],
    limits: Limits | None = None,
    refuse: Callable[[Exception], list[bytes]] | None = None,
) -> None:
    """Answer messages from standard input until it ends; `refuse` answers one that raised an error.

    A MemoryError ends the process, because the rest of its memory cannot be relied on; so does any error without `refuse`.
    """
    stdin, stdout = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # a stray print is not a message
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    gc.collect()
    gc.freeze()
    gc.disable()  # messages are large and have no cycles; garbage of errors is collected between them
    _write(stdout, _head([]))
    while True:
        try:
            sizes = _read_head(stdin)
            if limits is not None:
                limit_memory(limits.memory + int(limits.memory_per_byte * sum(sizes)))
                # Its signal, SIGPROF, ends the process.
                signal.setitimer(signal.ITIMER_PROF, limits.cpu_s + limits.cpu_s_per_byte * sum(sizes))
            parts = [_read(stdin, size) for size in sizes]
        except EOFError:
            return
        try:
            answered = answer(parts)
        except MemoryError:
            raise
        except Exception as error:  # any: it is this message's alone
            if refuse is None:
                raise
            answered = refuse(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        del parts
        gc.collect()
        if trim is not None:
            trim(0)
        _write(stdout, _head(answered))
        answered.reverse()
        while answered:
            _write(stdout, answered.pop())
        if trim is not None:
            trim(0)


def limit_memory(more: int) -> None:
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


def _read_head(file: int) -> list[int]:
    """Return the sizes of the next message's parts. Raises EOFError."""
    [count] = _numbers(_read(file, _SIZE_BYTES))
    return _numbers(_read(file, count * _SIZE_BYTES))


def _numbers(data: bytearray) -> list[int]:
    return [int.from_bytes(data[at : at + _SIZE_BYTES], "little") for at in range(0, len(data), _SIZE_BYTES)]


def _read(file: int, size: int) -> bytearray:
    """Return so many bytes of a pipe. Raises EOFError."""
    data = bytearray()  # it grows: filling so many bytes with zeros would hold the GIL
    while len(data) < size:
        piece = os.read(file, min(size - len(data), _PIECE_BYTES))
        if not piece:
            raise EOFError
        data += piece
    return data


def _write(file: int, part: bytes | bytearray) -> None:
    sent = 0
    with memoryview(part) as view:
        while sent < len(view):
            with view[sent : sent + _PIECE_BYTES] as piece:
                sent += os.write(file, piece)
