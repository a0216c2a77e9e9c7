"""Work that is worth doing only while the client is there. Event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

Result = TypeVar("Result")


async def unless_disconnected(receive: Receive, work: Coroutine[None, None, Result]) -> Result:
    """The result of `work`, or ClientDisconnect as soon as nobody waits for it. The body must have been read."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(receive())  # all that can follow the body is the disconnect
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
