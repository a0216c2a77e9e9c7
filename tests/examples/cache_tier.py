"""A cache tier: K/V blocks compressed in main memory, behind the host blocks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from engine.core.kv.tiers import News, Transfer, TransferEnd
from engine.core.stats import TransferKind

if TYPE_CHECKING:
    from engine.runtime.transports.base import Opening


def open_store(opening: Opening) -> CompressedStore | None:
    """Open the tier; None if it is not configured."""
    if not opening.config.kv_offload_gib:
        return None
    return CompressedStore(opening, num_slots=64)


class CompressedStore:
    """A Store; a thread compresses blocks, so that steps do not wait."""

    is_shared = False
    kept: Sequence[tuple[bytes, int]] = ()  # nothing survives the process

    def __init__(self, opening: Opening, num_slots: int) -> None:
        self.num_slots = num_slots
        self._pool = opening.pool
        self._slots: dict[int, bytes] = {}
        self._thread = ThreadPoolExecutor(1, "compressed-kv")
        self._reports: SimpleQueue[TransferEnd] = SimpleQueue()

    def start(self, transfers: Iterable[Transfer]) -> None:
        """Queue transfers, loads first."""
        for transfer in sorted(transfers, key=lambda each: each.kind is TransferKind.SAVE):
            self._thread.submit(self._move, transfer)

    def _move(self, transfer: Transfer) -> None:
        self._pool.finish_copies()
        row = self._pool.row(transfer.host_block)
        try:
            if transfer.kind is TransferKind.SAVE:
                self._slots[transfer.slot] = zlib.compress(row, level=1)
            else:
                row[:] = zlib.decompress(self._slots[transfer.slot])
        except (zlib.error, MemoryError):
            self._reports.put((transfer, False))
        else:
            self._reports.put((transfer, True))

    def finished(self, wait_s: float) -> list[TransferEnd]:
        """Return the transfers that ended; wait up to `wait_s` for one."""
        try:
            reports = [self._reports.get(timeout=wait_s) if wait_s else self._reports.get_nowait()]
            while not self._reports.empty():
                reports.append(self._reports.get_nowait())
        except Empty:
            return []
        return reports

    def news(self) -> list[News]:
        """Return nothing: only the engine writes here."""
        return []

    def close(self) -> None:
        """Finish what is queued."""
        self._thread.shutdown()
