"""One thread for Python that takes long, so that the event loop is not held up by it.

It is one, as each of several would take its turn of the GIL before the event loop's next. While it works, the GIL
changes hands within SWITCH_S instead of Python's 5 ms: an answer passes the event loop several times. The garbage
collector pauses, for it would go over all that is being made again and again, 50 ms each time, without giving up the GIL.
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
    """Run a function on that thread, after those that came before."""
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
