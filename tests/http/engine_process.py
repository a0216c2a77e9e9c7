"""An engine in another process, and the EngineHandle of this one: two ends of a socket over which only bytes go.

The process is a fork, so that a test's runner and what it makes fail are there; from then on the two share nothing but
the gate. A frame is a length and the bytes of (number of the call, what it is, its arguments or reply).
"""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from engine.core.errors import ErrorValue, QuireError, ServerError
from engine.core.types import AbortCause, Request, StepEvents
from engine.handle import Command, EngineHandle, EngineHealth, LoadedAdapter
from engine.loop import Engine
from tests.patience import PATIENCE_S
from tests.values import dumps, loads

_NUMBER_BYTES = 4


class _Wire:
    """One end of the socket; any thread may send."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._file = end, end.makefile("rb")
        self._sending = threading.Lock()

    def send(self, *values: object) -> None:
        data = dumps(values)
        with self._sending:
            self._end.sendall(len(data).to_bytes(_NUMBER_BYTES, "big") + data)

    def receive(self) -> Any:
        """Return the next values, None at the end."""
        head = self._file.read(_NUMBER_BYTES)
        return loads(self._file.read(int.from_bytes(head, "big"))) if len(head) == _NUMBER_BYTES else None

    def close(self) -> None:
        self._end.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._end.close()


# -- the engine's process ----------------------------------------------------------------------------------------------


def _serve(end: socket.socket, engine: Engine, check: Callable[[], None]) -> None:
    wire = _Wire(end)
    methods: Mapping[str, Callable[..., Any]] = {
        "start": lambda: engine.start(lambda events: wire.send(0, "events", [*events]), lambda: wire.send(0, "end")),
        "read": lambda name: dict(engine.adapters) if name == "adapters" else getattr(engine, name),
        "submit": engine.submit,
        "abort": engine.abort,
        "health": engine.health,
        "order_stop": engine.order_stop,
        "stop": engine.stop,
        "check": check,
    }
    while (call := wire.receive()) is not None:
        number, name, *arguments = call
        if name == "control":
            engine.control(*arguments).add_done_callback(lambda done, number=number: _reply(wire, number, done.result))
        else:
            _reply(wire, number, lambda name=name, arguments=arguments: methods[name](*arguments))


def _reply(wire: _Wire, number: int, work: Callable[[], Any]) -> None:
    try:
        outcome = work()
    except CancelledError:
        wire.send(number, "cancelled")
    except Exception as error:
        known = error if isinstance(error, QuireError) else ServerError(f"{type(error).__name__}: {error}")
        wire.send(number, "error", ErrorValue.of(known))
    else:
        wire.send(number, "reply", outcome)


def _leave_files_of_the_other(kept: int) -> None:
    """Let go of its connections, whose ends would not be seen there. Their numbers stay taken: objects here close them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in list(Path("/proc/self/fd").iterdir()):
        if int(file.name) not in (0, 1, 2, kept, nothing):
            os.dup2(nothing, int(file.name))


# -- the server's process ----------------------------------------------------------------------------------------------


class EngineProcess:
    """The EngineHandle of an engine that `make` builds in another process; `check` runs there when it is idle."""

    def __init__(self, make: Callable[[], tuple[Engine, Callable[[], None]]]) -> None:
        ours, theirs = socket.socketpair()
        self._process = os.fork()
        if self._process == 0:
            _run(theirs, make)
        theirs.close()
        self.clock = time.monotonic
        self._wire = _Wire(ours)
        self._calls: dict[int, Future[Any]] = {}
        self._next, self._lock = 1, threading.Lock()
        self._deliver: Callable[[StepEvents], None] = lambda _: None
        self._on_end: Callable[[], None] = lambda: None
        threading.Thread(target=self._listen, name="engine-process", daemon=True).start()
        self.config, self.facts = self._call("read", "config"), self._call("read", "facts")

    def _listen(self) -> None:
        while (said := self._wire.receive()) is not None:
            number, kind, *values = said
            if kind == "events":
                with suppress(RuntimeError):  # the loop is closed: its server left an engine that hung
                    self._deliver(StepEvents(*values))
            elif kind == "end":
                self._on_end()
            else:
                self._settle(self._calls.pop(number), kind, *values)

    def _settle(self, outcome: Future[Any], kind: str, value: Any = None) -> None:
        if kind == "cancelled":
            outcome.cancel()
        if not outcome.set_running_or_notify_cancel():
            return
        if kind == "reply":
            outcome.set_result(value)
        else:
            outcome.set_exception(value.exception())

    def _ask(self, *call: object) -> Future[Any]:
        outcome: Future[Any] = Future()
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._calls[number] = outcome
        self._wire.send(number, *call)
        return outcome

    def _call(self, *call: object) -> Any:
        return self._ask(*call).result(PATIENCE_S)

    @property
    def stats(self) -> Any:
        return self._call("read", "stats")

    @property
    def adapters(self) -> Mapping[str, LoadedAdapter]:
        return self._call("read", "adapters")

    @property
    def is_running(self) -> bool:
        return self._call("read", "is_running")

    def start(self, deliver: Callable[[StepEvents], None], on_end: Callable[[], None] = lambda: None) -> None:
        self._deliver, self._on_end = deliver, on_end
        self._call("start")

    def submit(self, *requests: Request) -> None:
        self._call("submit", *requests)

    def abort(self, request_id: str, cause: AbortCause, choice: int | None = None) -> None:
        self._ask("abort", request_id, cause, choice)

    def control(self, command: Command[Any]) -> Future[Any]:
        return self._ask("control", command)

    def health(self) -> EngineHealth:
        return self._call("health")

    def order_stop(self, drain_s: float) -> None:
        self._call("order_stop", drain_s)

    def stop(self, drain_s: float) -> None:
        self._call("stop", drain_s)

    def check(self) -> None:
        """Raise what the other process finds wrong with the idle scheduler."""
        self._call("check")

    def close(self) -> None:
        """End the process."""
        self._wire.close()
        os.waitpid(self._process, 0)


def _run(end: socket.socket, make: Callable[[], tuple[Engine, Callable[[], None]]]) -> NoReturn:
    try:
        gc.freeze()
        _leave_files_of_the_other(end.fileno())
        _serve(end, *make())
    finally:
        os._exit(0)


def _is_a_handle(engine: EngineProcess) -> EngineHandle:
    return engine  # mypy sees whether it is one
