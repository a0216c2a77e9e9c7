"""Indexes of blocks by content, for the prefix cache and the tiers.

Owned by the scheduler, engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from engine.core.kv.block_pool import BlockPool

MAX_CHECKED = 1 << 14  # blocks a call of check_integrity: half a millisecond per thousand


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


class Tier(BlockIndex):
    """Blocks of host memory or of a store, findable by content."""

    __slots__ = ("_digest_of", "_next_checked")

    def __init__(self, num_blocks: int, eviction: str, pins: Container[bytes] = (), max_pinned: int = 0) -> None:
        super().__init__(num_blocks, self._evicted, eviction, pins, max_pinned)
        self._digest_of: dict[int, bytes] = {}
        self._next_checked = 0

    def find(self, digest: bytes) -> int:
        """Return the block with this content; -1 if there is none."""
        return self._block_of.get(digest, -1)

    def content(self, block: int) -> bytes | None:
        """Return the digest that a block can be found by; None if it cannot be found."""
        return self._digest_of.get(block)

    def put(self, digest: bytes, block: int) -> None:
        """Make a held block findable; no other block has this content."""
        self._digest_of[block] = digest
        self._index(digest, block)

    def forget(self, block: int) -> None:
        """Make a block's content unfindable."""
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
            self.pool.forget(block)

    def _evicted(self, block: int) -> None:
        del self._block_of[self._digest_of.pop(block)]

    def check_integrity(self, holders: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless `holders` hold what is held, and both directions of the index agree.

        Each call looks at the next MAX_CHECKED blocks only: a request that arrives meanwhile waits for it.
        """
        first, num_blocks = self._next_checked, self.pool.num_blocks
        blocks = range(first, min(first + MAX_CHECKED, num_blocks))
        self._next_checked = blocks.stop if blocks.stop < num_blocks else 0
        self.pool.check_integrity(holders, blocks)
        for block in blocks:
            digest = self._digest_of.get(block)
            assert digest is None or self._block_of.get(digest) == block, f"block {block} is not where its content is"
        assert len(self._block_of) == len(self._digest_of), "a content is nowhere"
