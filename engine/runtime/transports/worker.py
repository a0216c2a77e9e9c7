"""The thread of a store: moves blocks one after the other, those that requests wait for first."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Iterable
from typing import Protocol

from engine.core.kv.tiers import News, Transfer, TransferEnd
from engine.core.stats import TransferKind

log = logging.getLogger("quire.kv_store")

_MAX_LOGGED = 5  # faults in a row; more are only counted ...
_LOG_AGAIN_S = 600.0  # ... until there was none for so long
_CLOSE_S = 10.0  # for what is queued when the daemon stops; a file system may hang


class Rows(Protocol):
    """The part of host memory that a store works on."""

    def row(self, host_block: int) -> memoryview: ...

    def finish_copies(self) -> None: ...


class Worker:
    """A Transport whose thread calls `_move` for each transfer, and `_look` when there was none for `look_s`."""

    def __init__(self, pool: Rows, name: str, look_s: float | None = None) -> None:
        self._pool, self._look_s = pool, look_s
        self._num_logged, self._last_fault_s = 0, 0.0
        self._is_looking_well = True
        self._order = itertools.count()
        self._queue: queue.PriorityQueue[tuple[int, int, Transfer | None]] = queue.PriorityQueue()
        self._done: queue.SimpleQueue[TransferEnd] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

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
        """Return nothing: only `start` changes what is here."""
        return []

    def close(self) -> None:
        """Finish what is queued, and end the thread, as far as that is a matter of seconds."""
        self._queue.put((2, next(self._order), None))
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            log.warning("The thread %s did not end within %g s and is left behind.", self._thread.name, _CLOSE_S)

    # -- its own thread ------------------------------------------------------------------------------------------------

    def _move(self, transfer: Transfer, row: memoryview) -> bool:
        """Move a block; returns whether `row` or the store now has it."""
        raise NotImplementedError

    def _look(self) -> None:
        """Look for changes that others made."""

    def _work(self) -> None:
        looked_s = 0.0
        while True:
            if self._look_s is not None and time.monotonic() - looked_s >= self._look_s:
                self._look_again()
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

    def _look_again(self) -> None:
        """Look; an error ends neither the thread nor the next look, and is logged once in a row."""
        try:
            self._look()
        except Exception as error:
            if self._is_looking_well:
                log.warning("K/V of other daemons is not used for now: %s: %s", type(error).__name__, error)
            self._is_looking_well = False
        else:
            self._is_looking_well = True

    def _log(self, transfer: Transfer, reason: str) -> None:
        now = time.monotonic()
        self._num_logged = 1 if now - self._last_fault_s > _LOG_AGAIN_S else self._num_logged + 1
        self._last_fault_s = now
        if self._num_logged <= _MAX_LOGGED:
            last = "; more of this is only counted" if self._num_logged == _MAX_LOGGED else ""
            message = "A K/V block on disk could not be used (%s, slot %d): %s%s"
            log.warning(message, transfer.kind.value, transfer.slot, reason, last)
