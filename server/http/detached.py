"""Runs blocking calls on threads that do not keep the process alive.

asyncio.to_thread keeps the process alive until its call returns: reading a file of a dead network filesystem would keep it
for ever, in spite of signals.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def run_detached(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call on a thread of its own and return its result; cancelling does not stop the call."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # from here on the result is set, even if the waiting task was cancelled

    def work() -> None:
        try:
            outcome.set_result(call(*args, **kwargs))
        except Exception as error:  # raised where it is awaited
            outcome.set_exception(error)

    threading.Thread(target=work, name="quire-detached", daemon=True).start()
    return await asyncio.wrap_future(outcome)
