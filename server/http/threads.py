"""Runs work beside the event loop: slow Python code on one thread, calls that may hang on threads of their own.

There is one slow thread because each of several would take a turn of the GIL before the event loop's next. While it works,
the GIL changes hands within SWITCH_S instead of Python's 5 ms, as an answer needs the event loop several times. The garbage
collector is paused: it would scan the new objects repeatedly, for 50 ms each time, without releasing the GIL.

asyncio.to_thread keeps the process alive until its call returns: reading a file of a dead network filesystem would keep it
for ever, in spite of signals. A detached thread does not.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

SWITCH_S = 0.0005

P = ParamSpec("P")
Result = TypeVar("Result")

_SLOW = ThreadPoolExecutor(1, "quire-slow")


async def run_slowly(function: Callable[[], Result]) -> Result:
    """Run a function on the slow thread, after earlier ones, and return its result."""
    return await asyncio.get_running_loop().run_in_executor(_SLOW, _work, function)


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


async def run_detached(call: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """Run a call on a new thread and return its result; it cannot be cancelled."""
    outcome: Future[Result] = Future()
    outcome.set_running_or_notify_cancel()  # so that the result can be set, even if the waiting task was cancelled

    def work() -> None:
        try:
            outcome.set_result(call(*args, **kwargs))
        except Exception as error:  # raised where it is awaited
            outcome.set_exception(error)

    threading.Thread(target=work, name="quire-detached", daemon=True).start()
    return await asyncio.wrap_future(outcome)
