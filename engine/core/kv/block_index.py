"""Blocks by content: the common part of the prefix cache and of the tiers below it.

Owned by the scheduler, engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Container

from engine.core.kv.block_pool import BlockPool


class BlockIndex:
    """A BlockPool, and the names of its blocks' contents; pins.py decides which go last."""

    __slots__ = ("_block_of", "_pins", "pool")

    def __init__(
        self, num_blocks: int, on_evict: Callable[[int], None], eviction: str, pins: Container[bytes], max_pinned: int
    ) -> None:
        self.pool = BlockPool(num_blocks, on_evict, eviction, max_pinned)
        self._pins = pins
        self._block_of: dict[bytes, int] = {}

    def _index(self, digest: bytes, block: int) -> None:
        """Make a held block findable by its content."""
        self._block_of[digest] = block
        self.pool.index(block)
        if self.pool.max_pinned and digest in self._pins:
            self.pool.pin(block)

    def pin(self, digest: bytes) -> None:
        """See pins.py."""
        block = self._block_of.get(digest)
        if block is not None:
            self.pool.pin(block)

    def unpin(self, digest: bytes) -> None:
        """See pins.py."""
        block = self._block_of.get(digest)
        if block is not None:
            self.pool.unpin(block)
