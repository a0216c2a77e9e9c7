"""A computation that goes on for a while at a time, between the steps of an engine.

It runs on its own thread, and only while the engine's thread waits for it, so the two never compete for cores.
It stops between two operations of torch, and within those of the native library (team.c): there too after some tenths of a
millisecond, since these are what takes long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from ctypes import c_double
from math import inf
from threading import Semaphore, Thread
from typing import Any, Generic, TypeVar

from torch.overrides import TorchFunctionMode

from engine.core.step import PendingStep, StepResult
from engine.runtime.native.library import native
from engine.system.calls import settle

T = TypeVar("T")


class _Closed(BaseException):
    """Ends the thread of a computation whose result is not needed."""


class Pieces(TorchFunctionMode, Generic[T]):
    """One computation, which may stop before and within operations; `advance` it until it is done."""

    def __init__(self, call: Callable[[], T]) -> None:
        super().__init__()
        self._call, self._until, self._is_closed = call, c_double(), False
        self._go, self._back = Semaphore(0), Semaphore(0)
        self._outcome: Future[T] = Future()
        self._thread = Thread(target=self._run, name="quire-pieces", daemon=True)
        self._thread.start()

    def advance(self, seconds: float) -> bool:
        """Go on for about so long; returns whether it is done."""
        if not self._outcome.done():
            self._until.value = _now() + seconds
            self._go.release()
            self._back.acquire()
        return self._outcome.done()

    def result(self) -> T:
        """Return the result of what is done, or raise its error."""
        assert self._outcome.done()
        return self._outcome.result()

    def close(self) -> None:
        """End it where it is."""
        self._is_closed = True
        self._go.release()
        self._thread.join()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _now() >= self._until.value and self._pause():  # this turn is over
            raise _Closed
        return func(*args, **(kwargs or {}))

    def _pause(self) -> bool:
        """Wait for the next turn; return whether there is none."""
        if not self._is_closed:
            self._back.release()
            self._go.acquire()
        return self._is_closed

    def _run(self) -> None:
        self._go.acquire()
        library = native()
        kept = None if library is None else library.pause(self._until, self._pause)  # noqa: F841 - it has to live
        if not self._is_closed:
            with self:
                settle(self._outcome, self._call)
        self._back.release()


class StepInPieces(PendingStep):
    """A step that is computed as long as it is asked to go on."""

    may_pause = True

    def __init__(self, compute: Callable[[], PendingStep], resume: Callable[[], None]) -> None:
        """`resume` undoes what another step, which ran meanwhile, has changed."""
        self._pieces, self._resume = Pieces(compute), resume
        self.is_over = self._is_closed = False

    def advance(self, seconds: float) -> bool:
        """Go on for about so long; returns whether it is done."""
        self._resume()
        self.is_over = self.is_over or self._pieces.advance(seconds)
        return self.is_over

    def close(self) -> None:
        """Compute no more of it."""
        self._is_closed = self.is_over = True
        self._pieces.close()

    def wait(self) -> StepResult:
        """Compute what is left, and return the result; of a step that was closed, an empty one."""
        self.advance(inf)
        return StepResult(token_ids=[]) if self._is_closed else self._pieces.result().wait()


def _now() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)
