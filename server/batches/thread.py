"""The one thread that the database belongs to. Event loop: nothing there ever waits for a disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from server.batches.store import Store

Result = TypeVar("Result")


class StoreThread:
    """Call it with what is to be done with the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="quire-batches")

    async def __call__(self, work: Callable[[Store], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, self._store)

    def close(self) -> None:
        """Waits for what has been asked for."""
        self._executor.shutdown()
        self._store.close()
