"""Runs work beside the event loop: slow Python code on one thread.

A thread serves its callers in rotation, so that one with much work does not hold up another.

There is one slow thread because each of several would take a turn of the GIL before the event loop's next. While it works,
the GIL changes hands within SWITCH_S instead of Python's 5 ms, as an answer needs the event loop several times. The garbage
collector is paused: it would scan the new objects repeatedly, for 50 ms each time, without releasing the GIL.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from engine.system.calls import settle
from server.http.middleware import CALLER, Rotation

SWITCH_S = 0.0005

Result = TypeVar("Result")


class Worker:
    """A thread that runs functions one after another, its callers in rotation."""

    def __init__(self, name: str, set_up: Callable[[], object] | None = None) -> None:
        """`set_up` is called on the thread first."""
        self._thread = ThreadPoolExecutor(1, name, set_up)
        self._lock = threading.Lock()
        self._waiting: Rotation[tuple[Future[Any], Callable[[], Any]]] = Rotation()

    async def run(self, function: Callable[[], Result]) -> Result:
        """Run a function when the caller's turn has come, and return its result."""
        outcome: Future[Result] = Future()
        with self._lock:
            self._waiting.put(CALLER.get(), (outcome, function))
        self._thread.submit(self._run_next)
        return await asyncio.wrap_future(outcome)

    def close(self) -> None:
        """Run what waits, and end the thread; does not wait for it."""
        self._thread.shutdown(wait=False)

    def _run_next(self) -> None:
        with self._lock:
            waiting = self._waiting.take()
        assert waiting is not None, "there is one for each call"
        outcome, function = waiting
        if outcome.set_running_or_notify_cancel():
            settle(outcome, function)


_SLOW = Worker("quire-slow")


async def run_slowly(function: Callable[[], Result]) -> Result:
    """Run a function on the slow thread, and return its result."""
    return await _SLOW.run(lambda: _work(function))


def _work(function: Callable[[], Result]) -> Result:
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        return function()
    finally:
        sys.setswitchinterval(usual_s)
        if is_collecting:
            gc.enable()


async def unless_disconnected(receive: Receive, work: Awaitable[Result]) -> Result:
    """Return the result of `work`; raise ClientDisconnect if the client disconnects.

    The body must have been read.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(receive())  # only the disconnect can follow the body
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
