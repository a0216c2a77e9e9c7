"""Runs the HTTP server until a signal or the engine's death, and ends open answers properly.

It serves before the models of the start are loaded; a signal meanwhile ends it. Then, first signal: new requests are refused
while open ones may finish within the shutdown timeout; then they are aborted. Second signal: they are aborted immediately.
Third: the process exits. A late signal changes no exit status. An engine that dies has already ended its streams; the
process follows with exit status 1. If the engine hangs, the event loop ends every open answer itself, and the process exits
with status 1 without waiting for it. SIGHUP reads the tenants and the certificate again; without either it drains, too,
unless nohup ignores it. Main thread, on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI
from starlette.datastructures import State

from engine.core.errors import ConfigError, ShuttingDownError
from engine.core.types import AbortCause
from server.answers.models import Models
from server.app import routers
from server.http.connection import Connection
from server.settings.tls import Tls
from server.tenancy.tenancy import Tenancy, read_tenants

if TYPE_CHECKING:
    from server.batches.worker import BatchService

log = logging.getLogger("quire.serve")

FLUSH_S = 5  # for complete answers to reach slow readers
STOP_MARGIN_S = 10.0  # a running step may exceed the timeout by this much before the process exits without it
LEAVE_S = 4 * FLUSH_S  # the process ends within this once the engine has stopped or was abandoned
WATCH_S = 0.25  # between two looks at the engine's health
STOPPING = signal.SIGINT, signal.SIGTERM
IDLE_S = 1.0  # after the start, and between two looks for an idle moment


def run(
    app: FastAPI,
    listener: socket.socket,
    shutdown_timeout_s: float,
    on_ready: Callable[[], None],
    tls: Tls | None = None,
) -> int:
    """Serve on a bound socket; `on_ready` is called once requests are accepted. Returns the exit status, 0 or 1.

    Raises what a load of the start raised, or KeyboardInterrupt for a signal before it has ended.
    """
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=Connection,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=FLUSH_S,
        **({} if tls is None else tls._asdict()),
    )
    daemon = Daemon(config, app.state, shutdown_timeout_s, on_ready, tls)
    try:
        daemon.run(sockets=[listener])
    except SystemExit:  # uvicorn's, with a status of its own, where the application did not start; it is in the log
        return 1
    if daemon.failure is not None:
        raise daemon.failure
    return 0 if daemon.started and not app.state.models.is_dead else 1


class Daemon(uvicorn.Server):
    """uvicorn's server, with signals that drain the engine before connections are closed."""

    def __init__(
        self,
        config: uvicorn.Config,
        parts: State,
        shutdown_timeout_s: float,
        on_ready: Callable[[], None],
        tls: Tls | None = None,
    ) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._models: Models = parts.models
        self._batches: BatchService | None = parts.batches
        self._add_rest: Callable[[], None] = parts.add_rest
        self._tenancy: Tenancy = parts.tenancy
        self._tenants, self._api_keys = parts.config.tenants, parts.config.api_keys
        self._tls = tls
        self._timeout_s = shutdown_timeout_s
        self.failure: BaseException | None = None  # of the start
        self._num_signals = 0
        self._loop: asyncio.AbstractEventLoop  # that `serve` runs in
        self._tasks: list[asyncio.Task[None]] = []

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `should_exit`, watching the engine."""
        self._loop = asyncio.get_running_loop()
        self._tasks.append(self._loop.create_task(self._watch()))
        if self._tenants is not None or self._tls is not None:
            self._loop.add_signal_handler(signal.SIGHUP, self._reread)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        elif signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # else nohup has it ignored
            self._loop.add_signal_handler(signal.SIGHUP, self._on_signal, "SIGHUP")
        try:
            await super().serve(sockets)
            if self._models.is_abandoned:
                leave()  # some threads wait for the engine, so nothing may wait for threads
        finally:
            for task in self._tasks:
                task.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take signals for good: once the server has ended, the third one still ends the process."""
        for each in STOPPING:
            signal.signal(each, self.handle_exit)
        try:
            yield
        finally:
            late = [*STOPPING, *([signal.SIGHUP] if self._loop.remove_signal_handler(signal.SIGHUP) else [])]
            for each in late:
                signal.signal(each, self._on_late_signal)

    def _on_late_signal(self, *_: object) -> None:
        self._num_signals += 1
        if isinstance(self.failure, KeyboardInterrupt):  # the start has ended, and waits for a load
            os._exit(130)
        if self._num_signals > 2:
            os._exit(1)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application and listen."""
        await super().startup(sockets)
        if self.started and not self._models.is_draining:
            self._tasks.append(self._loop.create_task(self._models.finish_start()))
            self._tasks[-1].add_done_callback(self._finish_start)

    def _finish_start(self, loading: asyncio.Task[None]) -> None:
        """Be ready once the models of the start are loaded, or exit with the error of a load."""
        if loading.cancelled():
            return
        if (error := loading.exception()) is not None:
            self._fail(error)
            return
        self._on_ready()
        if self._batches is not None:
            self._batches.worker.wake()
        self._tasks.append(self._loop.create_task(self._warm_up()))

    def _fail(self, failure: BaseException) -> None:
        """Exit, because the start has failed."""
        self.failure, self.should_exit = failure, True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of signal handlers
        """Wake the loop and do nothing else: a signal arrives between any two bytecodes of the main thread."""
        self._loop.call_soon_threadsafe(self._on_signal, signal.Signals(sig).name)

    def _on_signal(self, name: str) -> None:
        self._num_signals += 1
        if self._models.is_starting:
            self._fail(KeyboardInterrupt())
        elif self._num_signals == 1:
            num_open = self._models.num_open
            self._models.order_stop(self._timeout_s)  # before the log says so, and tasks have had their turns
            doing = f"finishing {num_open} open requests within {self._timeout_s:g} s" if num_open else "stopping"
            log.info("%s: %s", name, doing)
            self._tasks.append(self._loop.create_task(self._drain(self._timeout_s)))
        elif self._num_signals == 2:
            log.warning("%s again: aborting %d open requests", name, self._models.num_open)
            self._tasks.append(self._loop.create_task(self._drain(0.0)))
        else:
            log.error("%s for the third time: exiting immediately", name)
            os._exit(1)

    def _reread(self) -> None:
        """Read the tenants and the certificate again."""
        if self._tenants is not None:
            self._reread_tenants(self._tenants)
        if self._tls is not None:
            assert self.config.ssl is not None
            try:
                self._tls.load_into(self.config.ssl)
            except ConfigError as error:
                log.error("SIGHUP: the certificate stays as it was: %s", error)  # noqa: TRY400 - one sentence for the user
                return
            log.info("SIGHUP: read the certificate from %s", self._tls.ssl_certfile)

    def _reread_tenants(self, path: Path) -> None:
        try:
            tenants = read_tenants(path, self._api_keys)
        except ConfigError as error:
            log.error("SIGHUP: tenants stay as they were: %s", error)  # noqa: TRY400 - one sentence for the user
            return
        self._tenancy.replace(tenants)
        log.info("SIGHUP: %d tenants from %s", len(tenants), path)

    async def _drain(self, timeout_s: float) -> None:
        num_open = self._models.num_open
        stopping = [self._models.stop(timeout_s)]
        if self._batches is not None:
            stopping.append(self._batches.worker.stop())  # does not wait for running lines: the next daemon runs them
        try:
            await asyncio.wait_for(asyncio.gather(*stopping), timeout_s + STOP_MARGIN_S)
            if not self.should_exit:  # a second signal drains too
                self._log_end(num_open)
        except asyncio.TimeoutError:
            self._abandon()
        finally:
            self.should_exit = True
            self._loop.call_later(LEAVE_S, leave)

    def _log_end(self, num_open: int) -> None:
        """Log how many of the requests that were open at the signal did not finish."""
        if num_cut := sum(engine.stats.aborted[AbortCause.SHUTDOWN] for engine in self._models.engines):
            cause = f"--shutdown-timeout {self._timeout_s:g}" if self._num_signals == 1 else "a second signal"
            log.warning("stopped: the shutdown cut %d sequences short (%s)", num_cut, cause)
        elif num_open:
            log.info("stopped: every open request has finished")

    def _abandon(self) -> None:
        """End every open answer without the engine."""
        log.error(
            "a step of the engine has not returned; exiting without it, ending %d requests", self._models.num_open
        )
        message = "The server is shutting down and a step of its engine did not return; send the request again."
        self._models.abandon(ShuttingDownError(message))

    async def _warm_up(self) -> None:
        """Add the other endpoints and prepare grammars in moments without work: no request waits, and no stream for the GIL."""
        await asyncio.sleep(IDLE_S)
        for parts in self._models.loaded:
            while any(engine.health().busy for engine in self._models.engines):  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(IDLE_S)
            if parts.engine.facts.generates:
                await parts.model.prepare_grammars(warms_up=True)
        await asyncio.to_thread(routers)  # their imports
        self._add_rest()

    async def _watch(self) -> None:
        """Exit when all engines have died. Connections close once their streams, which the engine ended, are sent."""
        while not self._models.is_draining:
            if self._models.is_dead:
                log.critical("the engine is dead: exiting")
                self.should_exit = True
                return
            await asyncio.sleep(WATCH_S)


def leave() -> None:
    """End the process with status 1, without waiting for any thread."""
    logging.shutdown()
    os._exit(1)
