"""The index of one tier below the pool: which of its blocks has which content. Owned by the scheduler, engine thread."""

from __future__ import annotations

from collections.abc import Container, Iterable

from engine.core.kv.block_index import BlockIndex

MAX_CHECKED = 1 << 14  # blocks a call of check_integrity: half a millisecond per thousand


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
