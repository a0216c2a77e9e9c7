"""A computation in torch that goes on for a while at a time, between the steps of an engine.

It runs on its own thread, and only while the engine's thread waits for it, so the two never compete for torch's threads.
It stops between two operations of torch, into which a computation divides what takes long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Semaphore, Thread
from typing import Any, Generic, TypeVar

import torch
from torch.overrides import TorchFunctionMode

T = TypeVar("T")


class _Closed(BaseException):
    """Ends the thread of a computation whose result is not needed."""


class Pieces(Generic[T]):
    """One computation; `advance` it until it is done."""

    def __init__(self, call: Callable[[], T], num_threads: int) -> None:
        self._call, self._num_threads, self._until, self._is_closed = call, num_threads, 0.0, False
        self._go, self._back = Semaphore(0), Semaphore(0)
        self._outcome: T | BaseException | None = None
        self._thread = Thread(target=self._run, name="quire-image", daemon=True)
        self._thread.start()

    def advance(self, seconds: float) -> bool:
        """Go on for about so long; returns whether it is done."""
        self._until, usual = time.perf_counter() + seconds, torch.get_num_threads()
        self._go.release()
        self._back.acquire()
        torch.set_num_threads(usual)  # in part it is the process's
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

    def pause(self) -> None:
        """Wait for the next turn, if this one is over. On its thread."""
        if time.perf_counter() >= self._until:
            self._back.release()
            self._wait()

    def _wait(self) -> None:
        self._go.acquire()
        if self._is_closed:
            raise _Closed
        torch.set_num_threads(self._num_threads)

    def _run(self) -> None:
        try:
            self._wait()
            with _Pausing(self.pause):
                self._outcome = self._call()
        except BaseException as error:  # any: it is raised where the result is asked for
            self._outcome = error
        self._back.release()


class _Pausing(TorchFunctionMode):
    """Calls `pause` before every operation."""

    def __init__(self, pause: Callable[[], None]) -> None:
        super().__init__()
        self._pause = pause

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._pause()
        return func(*args, **(kwargs or {}))
