"""Keeps the processes of trial.py: starts them when they are first needed, asks them, ends them.

Used by the maker's worker threads, each with a lane of its own. POSIX only, as all of the daemon.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.errors import InvalidRequestError, OverloadedError
from engine.text.grammars.spec import GrammarSpec, Kind

_MAX_START_S = 60.0  # an interpreter and a vocabulary on a machine that is busy with everything else
_MAX_ANSWER_S = 60.0  # the trial process keeps to its own limits, which are far below
_RETRY_S = 5.0
_SCRIPT = Path(__file__).with_name("trial.py")
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")  # no keys, no settings
_KEYWORD = re.compile(r'(?:Unimplemented keys: \["|Invalid type: |Unknown format: )([^"\n]+)')
# A regex and a choice are wrapped in a line of Lark, whose places mean nothing to the client.
_WRAPPED = re.compile(r"^at \d+\(\d+\): (invalid regex .* \(in regex\): )?")
# What the library says of a grammar that no text can match.
_PLAIN_WORDS = dict.fromkeys(("", "NoExtension", "NoExtensionBias"), "no text can match it")
_LIMIT = re.compile(r"too many|too big|fuel|row has \d+ items|too complex", re.IGNORECASE)
_FORCED = "forced bytes"  # the library took forced text that spells a special token for that token


class GrammarError(InvalidRequestError):
    """A grammar that cannot be used; the message says why, and does not yet say which field it came in."""


class SlowError(GrammarError):
    """A grammar that takes more CPU time than it was given."""


class Tried(NamedTuple):
    """A grammar that passed."""

    grammar: str  # in llguidance's form
    num_bytes: int  # of memory


class _Running(NamedTuple):
    process: subprocess.Popen[bytes]
    lanes: list[Connection]

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Trials:
    """The processes that grammars are tried in. `setup` returns what they need to know of the model."""

    def __init__(self, setup: Callable[[], dict[str, Any]], num_lanes: int) -> None:
        self._setup = setup
        self._num_lanes = num_lanes
        self._lock = threading.Lock()  # around what follows
        self._running: _Running | None = None
        self._closed = threading.Event()

    def run(self, spec: GrammarSpec, *, lane: int, cpu_s: float) -> Tried:
        """The grammar in llguidance's form, known to build. Raises GrammarError, or OverloadedError if it was not tried."""
        running = self._start()
        answer = _ask(running, lane, {**spec._asdict(), "kind": spec.kind.value, "cpu_s": cpu_s}, _MAX_ANSWER_S)
        if "signal" in answer:
            raise _reason(answer["signal"], cpu_s)
        if "error" in answer:
            words = clean(answer["error"], is_in_lark=spec.kind is Kind.GRAMMAR)
            if _FORCED in words:
                words = (
                    "it forces text that spells a special token of this model, which a constrained answer cannot spell"
                )
            elif _LIMIT.search(words):
                words = f"it is too large, or too ambiguous, to be followed ({words}); make it smaller"
            raise GrammarError(words + _where(spec, answer["error"]))
        return Tried(answer["grammar"], answer["bytes"])

    def close(self) -> None:
        """End the processes, for good, though they may be starting. Idempotent."""
        self._closed.set()
        if self._running is not None:
            self._running.kill()

    def _start(self) -> _Running:
        if self._closed.is_set():
            raise _unavailable()
        with self._lock:
            running = self._running
            if running is None or running.process.poll() is not None:
                running = self._running = _spawn(self._num_lanes)
                if self._closed.is_set():  # perhaps before it could be seen
                    running.kill()
                answer = _ask(running, 0, self._setup(), _MAX_START_S)
                if "error" in answer:
                    running.kill()
                    reason = clean(str(answer["error"]))
                    raise GrammarError(f"this model's tokenizer cannot be used for structured outputs: {reason}")
            return running


def _spawn(num_lanes: int) -> _Running:
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    pairs = [socket.socketpair() for _ in range(num_lanes)]
    theirs = [their.fileno() for _, their in pairs]
    process = subprocess.Popen(  # noqa: S603 - ourselves, and a file of ours
        [sys.executable, str(_SCRIPT), *map(str, theirs)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment | {"MALLOC_ARENA_MAX": "1"},  # each arena more would be counted as 64 MiB of address space
        start_new_session=True,  # a Ctrl-C is for the daemon, which may still be draining
        pass_fds=theirs,
    )
    for _, their in pairs:
        their.close()
    return _Running(process, [Connection(ours.detach()) for ours, _ in pairs])


def _ask(running: _Running, lane: int, document: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """One message there and one back. Processes that do not answer are ended."""
    connection = running.lanes[lane]
    try:
        connection.send_bytes(json.dumps(document).encode())
        if not connection.poll(limit_s):
            raise EOFError
        answer: dict[str, Any] = json.loads(connection.recv_bytes())
    except (EOFError, OSError) as error:
        running.kill()
        raise _unavailable() from error
    return answer


def _unavailable() -> OverloadedError:
    return OverloadedError("Grammars cannot be tried now; try again later.", retry_after_s=_RETRY_S)


def _reason(number: int, cpu_s: float) -> Exception:
    """Why the kernel ended a trial, by the signal."""
    if number == signal.SIGPROF:
        return SlowError(f"it takes more than {cpu_s:g} s of CPU time to compile; make it smaller")
    if number == signal.SIGALRM:
        return _unavailable()  # the machine's fault: it was given no CPU time
    if number == signal.SIGABRT:
        return GrammarError("it takes too much memory to compile; make it smaller")
    return GrammarError("it is too large, or nested too deeply, to compile; make it smaller")


def _where(spec: GrammarSpec, message: str) -> str:
    """The path of a keyword that the message complains of; the library tells only its name."""
    found = _KEYWORD.search(message) if spec.kind is Kind.JSON_SCHEMA else None
    path = _path_of(json.loads(spec.text), found[1]) if found else None
    return f" at {path}" if path else ""


def _path_of(schema: Any, keyword: str, path: str = "$") -> str | None:
    """Where a schema has the keyword first."""
    items = schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    for name, value in items:
        inner = f"{path}.{name}" if isinstance(name, str) else f"{path}[{name}]"
        found = inner if name == keyword or value == keyword else _path_of(value, keyword, inner)
        if found:
            return found
    return None


def clean(message: str, *, is_in_lark: bool = True) -> str:
    """llguidance's message in one line: what and where, without its drawing of the place and its own names."""
    lines = []
    for line in message.splitlines():
        if line.lstrip()[:1].isdigit() and " | " in line:
            break  # the place in the source follows, which the client has
        if set(line.strip()) <= {"^"} or line.startswith("<"):
            continue
        lines.append(line.strip())
    text = " ".join(" ".join(lines).split()).rstrip(".")
    text = text if is_in_lark else _WRAPPED.sub("", text)
    return _PLAIN_WORDS.get(text, text)
