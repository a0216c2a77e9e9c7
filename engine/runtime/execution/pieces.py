"""A computation in torch that goes on for a while at a time, between the steps of an engine.

It runs on its own thread, and only while the engine's thread waits for it, so the two never compete for cores.
It stops between two operations of torch, into which a computation divides what takes long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Semaphore, Thread
from typing import Any, Generic, TypeVar

from torch.overrides import TorchFunctionMode

T = TypeVar("T")


class _Closed(BaseException):
    """Ends the thread of a computation whose result is not needed."""


class Pieces(TorchFunctionMode, Generic[T]):
    """One computation, which may stop before every operation; `advance` it until it is done."""

    def __init__(self, call: Callable[[], T]) -> None:
        super().__init__()
        self._call, self._until, self._is_closed = call, 0.0, False
        self._go, self._back = Semaphore(0), Semaphore(0)
        self._outcome: T | BaseException | None = None
        self._thread = Thread(target=self._run, name="quire-image", daemon=True)
        self._thread.start()

    def advance(self, seconds: float) -> bool:
        """Go on for about so long; returns whether it is done."""
        self._until = time.perf_counter() + seconds
        self._go.release()
        self._back.acquire()
        return self._outcome is not None

    def result(self) -> T:
        """Return the result of what is done, or raise its error."""
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        assert self._outcome is not None, "it is done"
        return self._outcome

    def close(self) -> None:
        """End it where it is."""
        self._is_closed = True
        self._go.release()
        self._thread.join()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.perf_counter() >= self._until:  # this turn is over
            self._back.release()
            self._wait()
        return func(*args, **(kwargs or {}))

    def _wait(self) -> None:
        self._go.acquire()
        if self._is_closed:
            raise _Closed

    def _run(self) -> None:
        try:
            self._wait()
            with self:
                self._outcome = self._call()
        except BaseException as error:  # any: it is raised where the result is asked for
            self._outcome = error
        self._back.release()
