"""How long a test waits for what must happen: a bound, never a measurement.

A wait ends on its event. The bound only turns a hang into a failure, so it is far beyond what a loaded machine takes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace

PATIENCE_S = 120.0
POLL_S = 0.002


def eventually(holds: Callable[[], bool]) -> None:
    """Return once `holds()` is true; fail after PATIENCE_S."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up_s, "it never happened"
        time.sleep(POLL_S)


def hurry_uvicorn() -> None:
    """Let uvicorn's servers end within 20 ms: they look every 0.1 s whether they are to, and then wait as long."""
    from uvicorn import server

    server.asyncio = SimpleNamespace(**{**vars(asyncio), "sleep": lambda _: asyncio.sleep(0.01)})
