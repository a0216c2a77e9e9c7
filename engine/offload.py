"""The engine's dealings with a disk behind the KV pool: between steps, in idle moments, and at the end. Engine thread.

Steps never wait for it. A plan without slices copies blocks to host memory; the store's own thread does the rest.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.core.errors import CopyError, DeviceMemoryError
from engine.core.kv.tiers import BlockStore
from engine.core.scheduler import Scheduler
from engine.core.step import Runner, StepPlan

_POLL_S = 0.002  # how long to wait for the disk before messages are looked at again
_MAX_FLUSH_S = 10.0


class Offload:
    """Does nothing where there is no store."""

    def __init__(self, scheduler: Scheduler, runner: Runner, store: BlockStore | None) -> None:
        self._scheduler, self._runner, self._store = scheduler, runner, store

    def exchange(self, wait_s: float = 0.0) -> None:
        """Tell the store what is wanted, and the scheduler what has come of it."""
        if self._store is None:
            return
        orders = self._scheduler.tiers.take_orders()
        if orders:
            self._store.start(orders)
        finished = self._store.finished(wait_s)
        if finished:
            self._scheduler.transferred(finished)

    def wait_for_fetch(self) -> bool:
        """Give the disk a moment, if that is all there is to wait for."""
        if self._store is None or not self._scheduler.tiers.is_fetching:
            return False
        self.exchange(_POLL_S)
        return True

    def spill(self) -> bool:
        """Have some of what is cached go to the disk; True while there is more to do."""
        if self._store is None:
            return False
        pairs = self._scheduler.tiers.spill()
        try:
            if pairs:
                self._runner.run(StepPlan(-1, [], [], 0, 0, swap_out=pairs)).wait()
        except DeviceMemoryError as error:
            self._scheduler.tiers.unstage()  # nothing was copied: these blocks are left out
            if isinstance(error, CopyError):
                self._scheduler.give_up_copies()
        self.exchange(_POLL_S)
        return self._scheduler.tiers.is_transferring

    def flush(self, clock: Callable[[], float]) -> None:
        """Write what can be written in a short while."""
        until_s = clock() + _MAX_FLUSH_S
        while self.spill() and clock() < until_s:
            pass

    def close(self) -> None:
        """Let the store go, once it has finished what it was told."""
        if self._store is not None:
            self._store.close()
