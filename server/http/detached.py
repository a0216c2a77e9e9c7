"""Runs blocking calls on threads that do not keep the process alive.

asyncio.to_thread keeps the process alive until its call returns: reading a file of a dead network filesystem would keep it
for ever, in spite of signals.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


async def run_detached(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call on a thread of its own and return its result; cancelling does not stop the call."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if outcome.done():  # cancelled
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(cast(T, result))

    def work() -> None:
        result: T | None = None
        failure: Exception | None = None
        try:
            result = call(*args, **kwargs)
        except Exception as error:  # raised where it is awaited
            failure = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name="quire-detached", daemon=True).start()
    return await outcome
