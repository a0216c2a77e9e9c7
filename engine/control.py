"""Carries out the commands of an EngineHandle, one entry of a table each.

What reads the scheduler runs on the engine's thread between two steps; what reads files or moves K/V runs on a thread of
its own, which keeps no process alive in spite of signals: a network filesystem may be dead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from engine.core.errors import UnreachableError
from engine.handle import (
    Command,
    CompileGrammar,
    CountMissing,
    LoadAdapter,
    OpenHandover,
    ReceivePrefix,
    SendPrefix,
    TakeSnapshot,
    UnloadAdapter,
    UseVocabulary,
)
from engine.inbox import EngineThread
from engine.resources import EngineResources
from engine.system.calls import T, on_thread

if TYPE_CHECKING:
    from engine.handover import Handover

_MAX_PULLS = 8  # at a time; each holds a piece of a parcel


class Control:
    """The commands of one engine. Any thread."""

    def __init__(self, engine: EngineThread, resources: EngineResources) -> None:
        self._engine, self._resources = engine, resources
        self._handover: Handover | None = None
        self._pulls = ThreadPoolExecutor(_MAX_PULLS, "quire-kv-pull")  # starts threads as needed
        self._table: Mapping[type[Command[Any]], Callable[[Any], Future[Any]]] = {
            TakeSnapshot: lambda _: engine.between_steps(lambda scheduler, _: scheduler.snapshot()),
            LoadAdapter: lambda command: on_thread(
                "quire-command", lambda: resources.adapters.load(command.name, command.path)
            ),
            UnloadAdapter: lambda command: on_thread("quire-command", lambda: resources.adapters.unload(command.name)),
            UseVocabulary: lambda command: on_thread(
                "quire-command", lambda: resources.grammars.use(command.source, command.warms_up)
            ),
            CompileGrammar: lambda command: resources.grammars.compile(command.spec, command.param),
            OpenHandover: lambda command: on_thread("quire-command", lambda: self._open(command)),
            CountMissing: lambda command: self._hand_over(lambda handover: handover.count_missing(command.prefix)),
            SendPrefix: lambda command: self._hand_over(lambda handover: handover.send(command.prefix)),
            ReceivePrefix: lambda command: self._pulls.submit(self._receive, command),
        }

    def __call__(self, command: Command[T]) -> Future[T]:
        """Carry out a command."""
        return self._table[type(command)](command)

    def close(self) -> None:
        """End the processes that compile grammars, and offer no K/V any more."""
        self._resources.grammars.close()
        self._pulls.shutdown(wait=False, cancel_futures=True)
        if self._handover is not None:
            self._handover.close()

    def _open(self, command: OpenHandover) -> int | None:
        from engine.handover import open_handover  # numpy, sockets: few engines hand over

        self._handover = open_handover(self._engine, command.config)
        return self._handover.port

    def _hand_over(self, work: Callable[[Handover], T]) -> Future[T]:
        return on_thread("quire-command", lambda: self._with_handover(work))

    def _receive(self, command: ReceivePrefix) -> int:
        name, prefix, peer, timeout_s = command.name, command.prefix, command.peer, command.timeout_s
        return self._with_handover(lambda handover: handover.receive(name, prefix, peer, timeout_s))

    def _with_handover(self, work: Callable[[Handover], T]) -> T:
        assert self._handover is not None, "opened before"
        try:
            return work(self._handover)
        except OSError as error:
            raise UnreachableError(f"{type(error).__name__}: {error}") from error
