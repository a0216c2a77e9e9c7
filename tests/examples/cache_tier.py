"""A cache tier: K/V blocks compressed in main memory, behind the host blocks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from engine.runtime.stores.tier import Opening, Tier


def open_tier(opening: Opening) -> Tier | None:
    """Open the tier; None if it is not configured."""
    if not opening.config.kv_offload_gib:
        return None
    return Tier(CompressedStore(num_slots=64), opening.pool)


class CompressedStore:
    """A Store. The tier's thread calls it, so that steps do not wait."""

    kept: Sequence[tuple[bytes, int]] = ()  # nothing survives the process

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: dict[int, tuple[bytes, bytes]] = {}

    def news(self) -> None:
        """Return nothing: only the engine writes here."""

    def put(self, name: bytes, row: memoryview, slot: int) -> None:
        """Compress a block in place of the one in the slot."""
        self._slots[slot] = name, zlib.compress(row, level=1)

    def get(self, name: bytes, row: memoryview) -> bool:
        """Decompress a block."""
        found = dict(self._slots.values()).get(name)
        if found is not None:
            row[:] = zlib.decompress(found)
        return found is not None

    def close(self) -> None:
        """Nothing is open."""
