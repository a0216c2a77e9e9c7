"""A tier below the pool: blocks in host memory or on a disk, findable by content. Owned by the scheduler, engine thread."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from engine.core.kv.block_index import BlockIndex

MAX_CHECKED = 1 << 14  # blocks a call: half a millisecond per thousand


class Tier(BlockIndex):
    """Blocks, findable by content."""

    __slots__ = ("_digest_of", "_next_checked", "_on_evict")

    def __init__(
        self,
        num_blocks: int,
        eviction: str,
        on_evict: Callable[[int], None] | None = None,
        pins: Container[bytes] = (),
        max_pinned: int = 0,
    ) -> None:
        super().__init__(num_blocks, self._evicted, eviction, pins, max_pinned)
        self._on_evict = on_evict
        self._digest_of: dict[int, bytes] = {}
        self._next_checked = 0

    def find(self, digest: bytes) -> int:
        """The block with that content; -1 if there is none."""
        return self._block_of.get(digest, -1)

    def content(self, block: int) -> bytes | None:
        """What a block can be found by."""
        return self._digest_of.get(block)

    def put(self, digest: bytes, block: int) -> None:
        """A held block has, or will have, a content that no other has."""
        self._digest_of[block] = digest
        self._index(digest, block)

    def forget(self, block: int) -> None:
        """Whatever a block has, it is not to be found any more."""
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
            self.pool.forget(block)

    def _evicted(self, block: int) -> None:
        del self._block_of[self._digest_of.pop(block)]
        if self._on_evict is not None:
            self._on_evict(block)

    def check_integrity(self, holders: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless `holders` hold what is held, and both directions of the index agree.

        Of many blocks only the next MAX_CHECKED are looked at: whoever comes meanwhile has to wait for it.
        """
        first, num_blocks = self._next_checked, self.pool.num_blocks
        blocks = range(first, min(first + MAX_CHECKED, num_blocks))
        self._next_checked = blocks.stop if blocks.stop < num_blocks else 0
        self.pool.check_integrity(holders, blocks)
        for block in blocks:
            digest = self._digest_of.get(block)
            assert digest is None or self._block_of.get(digest) == block, f"block {block} is not where its content is"
        assert len(self._block_of) == len(self._digest_of), "a content is nowhere"
