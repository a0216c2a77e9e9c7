"""Runs calls whose errors belong to another place: a thread that waits for them, or the user of another project's code."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

# Of the library transformers at a start: it imports its modules on first use, and a second thread finds them half imported.
TRANSFORMERS = threading.Lock()


def settle(outcome: Future[T], call: Callable[[], T]) -> None:
    """Give a future a call's result or exception."""
    try:
        result = call()
    except BaseException as error:  # any: it is raised where the result is asked for
        outcome.set_exception(error)
    else:
        outcome.set_result(result)


def on_thread(name: str, call: Callable[[], T]) -> Future[T]:
    """Run a call on a new thread, which does not keep the process alive; return its future, which cannot be cancelled."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()
    threading.Thread(target=settle, args=(outcome, call), name=name, daemon=True).start()
    return outcome


def step_back() -> None:
    """Let other threads go before this one for good."""
    if sys.platform == "linux":  # elsewhere it would be all threads of the process
        os.nice(19)


@contextmanager
def foreign_code(refuse: Callable[[Exception], Exception], passed: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Raise `refuse(error)` for any error of a block that calls another project's code, except those `passed`."""
    try:
        yield
    except passed:
        raise
    except Exception as error:  # any: the errors of such code have no common base
        raise refuse(error) from error
