"""Runs slow Python code on one thread, so that it does not block the event loop.

There is one thread because each of several would take a turn of the GIL before the event loop's next. While it works, the
GIL changes hands within SWITCH_S instead of Python's 5 ms, as an answer needs the event loop several times. The garbage
collector is paused: it would scan the new objects repeatedly, for 50 ms each time, without releasing the GIL.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

SWITCH_S = 0.0005

Result = TypeVar("Result")

_THREAD = ThreadPoolExecutor(1, "quire-slow")


async def run_slowly(function: Callable[[], Result]) -> Result:
    """Run a function on the slow thread, after earlier ones, and return its result."""
    return await asyncio.get_running_loop().run_in_executor(_THREAD, _work, function)


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
