"""The pool of KV blocks: their reference counts, and which one is allocated next.

Every block is in exactly one of three states, and the three always add up to the whole pool:

    free      it has no holder and its content is worthless
    cached    it has no holder, but the prefix cache can find its content; allocated last, in the order of eviction.py
    held      page tables hold it; its reference count is the number of holders

Pinned blocks are evicted after all other cached ones, the one freed longest ago first. A pin never denies a block to a
sequence that needs one, and the number of pinned blocks is bounded.

Integers only; the runner has the contents. Owned by the scheduler, engine thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from engine.core.kv.eviction import EVICTION_POLICIES, EvictionOrder, Lru


class BlockPool:
    """alloc / fork / free over `num_blocks` blocks; the writer copies a block that `is_shared`."""

    __slots__ = ("_cached", "_free", "_indexed", "_on_evict", "_pinned", "_refs", "_spared", "max_pinned", "num_blocks")

    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[int], None] | None = None,
        eviction: str = "lru",
        max_pinned: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.max_pinned = max_pinned
        self._refs = [0] * num_blocks
        # A dict used as an ordered set: O(1) to take one block out of the middle, and the end is at hand.
        self._free = dict.fromkeys(range(num_blocks - 1, -1, -1))
        self._cached = EVICTION_POLICIES[eviction](num_blocks)
        self._pinned: dict[int, None] = {}  # cached or held, pinned longest ago first ...
        self._spared = Lru()  # ... and those of them that are cached
        self._indexed: set[int] = set()
        self._on_evict = on_evict

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached) + len(self._spared)

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    @property
    def counts(self) -> tuple[int, int, int]:
        """The numbers of free, cached and held blocks: read twice a step, so together."""
        free, cached = len(self._free), len(self._cached) + len(self._spared)
        return free, cached, self.num_blocks - free - cached

    @property
    def cached_blocks(self) -> tuple[int, ...]:
        """Cached blocks, the next to be evicted first."""
        return (*self._cached, *self._spared)

    @property
    def num_available(self) -> int:
        """Blocks that `alloc` can hand out: free ones, then cached ones by evicting them."""
        return len(self._free) + len(self._cached) + len(self._spared)

    @property
    def is_exhausted(self) -> bool:
        """True if `alloc` has nothing to hand out; called for every block of an answer, so it counts nothing."""
        return not (self._free or self._cached or self._spared)

    @property
    def num_expendable(self) -> int:
        """Available blocks that are not pinned: contents that are merely cached may take these alone."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    def alloc(self, after: int = -1) -> int:
        """Take one block, preferably the one next to `after`: kernels read runs of adjacent blocks faster.

        The caller makes sure that `num_available` is not 0.
        """
        block = after + 1
        if block and block in self._free:
            del self._free[block]
        elif self._free:
            block = self._free.popitem()[0]
        else:
            block = self._evict()
        self._refs[block] = 1
        return block

    def alloc_many(self, count: int, after: int = -1) -> list[int]:
        """Take `count` blocks, in few runs of adjacent ones where that is cheap to find."""
        blocks = []
        for _ in range(count):
            after = self.alloc(after)
            blocks.append(after)
        # Evicted blocks come tail first, so ascending order restores the run that a finished sequence left behind.
        blocks.sort()
        return blocks

    def fork(self, block: int) -> None:
        """Add a holder to a block that is held or cached."""
        refs = self._refs[block]
        if not refs:
            self._order_of(block).remove(block)
        self._refs[block] = refs + 1

    def free(self, *blocks: int) -> None:
        """Drop one holder of each block, in this order. Without holders a block is cached if it is indexed, else free."""
        refs, indexed = self._refs, self._indexed
        for block in blocks:
            refs[block] -= 1
            if refs[block]:
                assert refs[block] > 0, f"block {block} freed more often than held"
            elif block in indexed:
                self._order_of(block).add(block)
            else:
                self._free[block] = None

    def found(self, blocks: Sequence[int]) -> None:
        """Note that an admitted prompt begins with these blocks; the eviction order may keep them longer for it."""
        self._cached.found(blocks)

    def pin(self, block: int) -> None:
        """Evict this indexed block after all that are not pinned.

        Beyond the bound the block that was pinned longest ago is unpinned: a prefix comes to lower tiers tail first.
        """
        if not self.max_pinned or block in self._pinned:
            return
        assert block in self._indexed
        if len(self._pinned) >= self.max_pinned:
            self.unpin(next(iter(self._pinned)))
        self._pinned[block] = None
        if not self._refs[block]:
            self._cached.remove(block)
            self._spared.add(block)

    def unpin(self, block: int) -> None:
        """Treat a block like any other; a cached one counts as freed now."""
        if block in self._pinned:
            del self._pinned[block]
            if not self._refs[block]:
                self._spared.remove(block)
                self._cached.add(block)

    def is_shared(self, block: int) -> bool:
        """True if a writer must copy the block first."""
        return self._refs[block] > 1

    def is_held(self, block: int) -> bool:
        """True if a block has any holder."""
        return self._refs[block] > 0

    def index(self, block: int) -> None:
        """Keep this held block's content when its last holder leaves: it can be found now."""
        assert self._refs[block] > 0 or block in self._indexed
        self._indexed.add(block)

    def forget(self, block: int) -> None:
        """Drop a block's content: it cannot be found any more."""
        self.unpin(block)
        self._indexed.discard(block)
        if block in self._cached:
            self._cached.remove(block)
            self._free[block] = None
        self._cached.forget(block)

    def _order_of(self, block: int) -> EvictionOrder:
        return self._spared if block in self._pinned else self._cached

    def _evict(self) -> int:
        if self._cached:
            block = self._cached.evict()
        else:
            block = self._spared.evict()
            del self._pinned[block]
            self._cached.forget(block)
        self._indexed.discard(block)
        if self._on_evict is not None:
            self._on_evict(block)
        return block

    def check_integrity(self, holders: Iterable[Iterable[int]], blocks: range | None = None) -> None:
        """Raise AssertionError unless the reference counts are exactly what `holders`, all page tables, hold.

        With `blocks`, only these are looked at.
        """
        expected = Counter[int]()
        for held in holders:
            expected.update(held)
        for block in range(self.num_blocks) if blocks is None else blocks:
            refs = self._refs[block]
            assert refs == expected.get(block, 0), f"block {block} has {refs} references and {expected[block]} holders"
            is_cached, is_spared, is_pinned = block in self._cached, block in self._spared, block in self._pinned
            places = (refs > 0) + (block in self._free) + is_cached + is_spared
            assert places == 1, f"block {block} is in {places} of the states free, cached and held"
            assert not (is_cached if is_pinned else is_spared), "a pin is in the wrong order"
            assert block in self._indexed or not (is_cached or is_pinned), "the prefix cache does not know a block"
        assert len(self._pinned) <= self.max_pinned
