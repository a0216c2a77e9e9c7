"""The thread of a store of cached blocks: moves blocks one after the other, those that requests wait for first.

A store's calls block, so the engine's thread makes none: a tier's thread makes them, and for a hand-over that of a
request (engine/handover.py).
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.core.kv.tiers import News, Transfer, TransferEnd
from engine.core.stats import TransferKind
from engine.core.types import Progress
from engine.settings.engine_config import EngineConfig

if TYPE_CHECKING:
    from engine.runtime.stores.host import HostPool  # needs torch

log = logging.getLogger("quire.kv_store")

LOOK_S = 1.0  # between two looks at what others have put into a shared store
_MAX_LOGGED = 5  # faults in a row; more are only counted ...
_LOG_AGAIN_S = 600.0  # ... until there was none for so long
_CLOSE_S = 10.0  # for what is queued when the daemon stops; a file system may hang


class Store(Protocol):
    """Blocks by their names. Who reads gets what was written under a name, or nothing."""

    num_slots: int

    @property
    def kept(self) -> Sequence[tuple[bytes, int]]:
        """Return (name, slot) of each block of an earlier process, oldest first."""

    def news(self) -> News | None:
        """Return which names others have put here or dropped since the last call."""

    def get(self, name: bytes, row: memoryview) -> bool:
        """Read a block; returns False if it is not here as it was written. Raises OSError."""

    def put(self, name: bytes, row: memoryview, slot: int) -> None:
        """Write a block in place of the one in the slot. Raises OSError."""

    def close(self) -> None:
        """Release everything."""


class Tier:
    """A Transport between host memory and a store. Start-up thread, then engine thread."""

    def __init__(self, store: Store, pool: HostPool, *, is_shared: bool = False) -> None:
        """Start the thread. Others write to a store that `is_shared`, and the engine only reads it."""
        self.store, self.is_shared = store, is_shared
        self._pool, self._look_s = pool, LOOK_S if is_shared else None
        self._num_logged, self._last_fault_s = 0, 0.0
        self._is_looking_well = True
        self._order = itertools.count()
        self._queue: queue.PriorityQueue[tuple[int, int, Transfer | None]] = queue.PriorityQueue()
        self._done: queue.SimpleQueue[TransferEnd] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="quire-kv-store", daemon=True)
        self._thread.start()

    def start(self, transfers: Iterable[Transfer]) -> None:
        """Queue transfers; requests wait for loads, so these go first."""
        for transfer in transfers:
            self._queue.put((transfer.kind is TransferKind.SAVE, next(self._order), transfer))

    def finished(self, wait_s: float) -> list[TransferEnd]:
        """Return the transfers that ended since the last call."""
        done = []
        try:
            done.append(self._done.get(timeout=wait_s) if wait_s else self._done.get_nowait())
            while True:
                done.append(self._done.get_nowait())
        except queue.Empty:
            return done

    def news(self) -> list[News]:
        """Return which blocks others have put into the store or dropped since the last call."""
        found = []
        while not self._news.empty():
            found.append(self._news.get())
        return found

    def close(self) -> None:
        """Finish what is queued, and end the thread, as far as that is a matter of seconds."""
        if self.is_shared:
            self.store.close()  # the thread may wait for a connection
        self._queue.put((2, next(self._order), None))
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():  # it still uses the store's files, which end with the process
            log.warning("The thread %s did not end within %g s and is left behind.", self._thread.name, _CLOSE_S)
        elif not self.is_shared:
            self.store.close()

    # -- its own thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        looked_s = 0.0
        while True:
            if self._look_s is not None and time.monotonic() - looked_s >= self._look_s:
                self._look()
                looked_s = time.monotonic()
            try:
                transfer = self._queue.get(timeout=self._look_s)[2]
            except queue.Empty:
                continue
            if transfer is None:
                return
            try:
                self._pool.finish_copies()
                is_good = self._move(transfer, self._pool.row(transfer.host_block))
            except Exception as error:  # whatever it is, the engine does without
                self._log(transfer, f"{type(error).__name__}: {error}")
                is_good = False
            self._done.put((transfer, is_good))

    def _move(self, transfer: Transfer, row: memoryview) -> bool:
        """Move a block; returns whether `row` or the store now has it."""
        if transfer.kind is TransferKind.SAVE:
            self.store.put(transfer.name, row, transfer.slot)
            return True
        is_good = self.store.get(transfer.name, row)
        if not (is_good or self.is_shared):  # where others may have replaced it since
            self._log(transfer, "it is not what was written")
        return is_good

    def _look(self) -> None:
        """Look for changes; an error ends neither the thread nor the next look, and is logged once in a row."""
        try:
            news = self.store.news()
        except Exception as error:  # any: the thread has blocks of its own to move
            if self._is_looking_well:
                log.warning("K/V of other daemons is not used for now: %s: %s", type(error).__name__, error)
            self._is_looking_well = False
        else:
            self._is_looking_well = True
            if news is not None:
                self._news.put(news)

    def _log(self, transfer: Transfer, reason: str) -> None:
        now = time.monotonic()
        self._num_logged = 1 if now - self._last_fault_s > _LOG_AGAIN_S else self._num_logged + 1
        self._last_fault_s = now
        if self._num_logged <= _MAX_LOGGED:
            last = "; more of this is only counted" if self._num_logged == _MAX_LOGGED else ""
            message = "A K/V block on disk could not be used (%s, slot %d): %s%s"
            log.warning(message, transfer.kind.value, transfer.slot, reason, last)


class Opening(NamedTuple):
    """What tiers are made from: the settings, host memory, and what K/V blocks are."""

    config: EngineConfig
    pool: HostPool
    block_bytes: int
    fingerprint: str  # of everything that K/V depends on
    report: Callable[[Progress], None]
    opened: Mapping[str, Tier]  # the tiers before this one
