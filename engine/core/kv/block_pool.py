"""The pool of KV blocks: the holders of each block, and the order of reuse. Engine thread.

    free      it has no holder and no useful content
    cached    it has no holder, but the prefix cache can find its content; reused last, in the order of eviction.py
    held      one or more page tables hold it; its reference count is the number of holders

Of the cached blocks those that a window has passed are reused first (`pass_by`), and the pinned ones last, least recently
released first. A pin does not keep a block from a sequence that needs one: it only orders eviction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.core.kv.eviction import EvictionOrder, Lru, Weighed


class BlockPool:
    """alloc / fork / free over `num_blocks` blocks; writers copy shared ones (`is_shared`)."""

    def __init__(self, num_blocks: int, max_pinned: int = 0) -> None:
        self.num_blocks = num_blocks
        self.max_pinned = max_pinned
        self.num_owed = 0  # available blocks that are kept for sequences, see SequenceKV
        self.version = 0  # changes with what can be found
        self._refs = [0] * num_blocks
        # A dict used as an ordered set: O(1) to remove a block from the middle or the end.
        self._free = dict.fromkeys(range(num_blocks - 1, -1, -1))
        self._cached: EvictionOrder = Lru()
        self._passed = Lru()
        self._pinned: dict[int, None] = {}  # cached or held, pinned longest ago first ...
        self._spared = Lru()  # ... and those of them that are cached
        self._indexed = bytearray(num_blocks)  # 1 for each findable block: copied in microseconds for the page
        self._on_evict: list[Callable[[int], None]] = []

    def on_evict(self, call: Callable[[int], None]) -> None:
        """Call this with each cached block that is about to be reused."""
        self._on_evict.append(call)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._passed) + len(self._cached) + len(self._spared)

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of free, cached and held blocks, together because steps read them often."""
        free, cached = len(self._free), self.num_cached
        return free, cached, self.num_blocks - free - cached

    @property
    def num_available(self) -> int:
        """Return how many blocks `alloc` can hand out: free ones, then cached ones by eviction."""
        return len(self._free) + len(self._passed) + len(self._cached) + len(self._spared)

    @property
    def num_spare(self) -> int:
        """Return how many available blocks are kept for no sequence; below 0 if less is available than was kept."""
        return self.num_available - self.num_owed

    @property
    def is_exhausted(self) -> bool:
        """Return whether `alloc` has nothing to hand out, without counting."""
        return not (self._free or self._cached or self._passed or self._spared)

    @property
    def num_expendable(self) -> int:
        """Return how many available blocks are not pinned: the room for blocks that are only cached."""
        return len(self._free) + len(self._passed) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    def alloc(self, after: int = -1) -> int:
        """Allocate a block, preferably the one after `after`: kernels read adjacent blocks faster.

        The caller ensures that `num_available` is not 0.
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
        """Allocate `count` blocks, in few runs of adjacent ones."""
        blocks = []
        for _ in range(count):
            after = self.alloc(after)
            blocks.append(after)
        # Evicted blocks arrive tail first, so ascending order restores the run that a finished sequence left.
        blocks.sort()
        return blocks

    def fork(self, block: int) -> None:
        """Add a holder to a block that is held or cached."""
        refs = self._refs[block]
        if not refs:
            self._order_of(block).remove(block)
        self._refs[block] = refs + 1

    def free(self, *blocks: int) -> None:
        """Remove one holder of each, in order; without holders a block is cached if indexed, else free."""
        refs, indexed = self._refs, self._indexed
        for block in blocks:
            refs[block] -= 1
            if refs[block]:
                assert refs[block] > 0, f"block {block} freed more often than held"
            elif indexed[block]:
                self._order_of(block).add(block)
            else:
                self._free[block] = None

    def pass_by(self, *blocks: int) -> None:
        """As `free`, for blocks whose content few prompts will find again: cached, they are evicted before all others."""
        for block in blocks:
            self.free(block)
            if not self._refs[block] and self._indexed[block] and block not in self._pinned:
                self._cached.remove(block)
                self._passed.add(block)

    def weigh(self, blocks: Iterable[int], weight: float) -> None:
        """Report to the eviction order how much a content of these blocks saves, as a multiple of K/V in their place."""
        if isinstance(self._cached, Lru):
            self._cached = Weighed(self._cached)
        for block in blocks:
            self._cached.weigh(block, weight)

    def pin(self, block: int) -> None:
        """Evict this findable block after all that are not pinned.

        Beyond the bound the oldest pin is removed, because a prefix arrives in lower tiers tail first.
        """
        if not self.max_pinned or block in self._pinned:
            return
        assert self._indexed[block]
        if len(self._pinned) >= self.max_pinned:
            self.unpin(next(iter(self._pinned)))
        if not self._refs[block]:
            self._order_of(block).remove(block)
            self._spared.add(block)
        self._pinned[block] = None

    def unpin(self, block: int) -> None:
        """Remove a pin; a cached block then counts as released now."""
        if block in self._pinned:
            del self._pinned[block]
            if not self._refs[block]:
                self._spared.remove(block)
                self._cached.add(block)

    def is_shared(self, block: int) -> bool:
        """Return whether a writer must copy the block first."""
        return self._refs[block] > 1

    def is_held(self, block: int) -> bool:
        """Return whether a block has any holder."""
        return self._refs[block] > 0

    def index(self, block: int) -> None:
        """Mark a held block as findable: its content stays cached after the last holder leaves."""
        assert self._refs[block] > 0 or self._indexed[block]
        self._indexed[block] = 1
        self.version += 1

    def forget(self, block: int) -> None:
        """Mark a block as not findable any more; without holders it becomes free."""
        self.unpin(block)
        self._indexed[block] = 0
        self.version += 1
        order = self._order_of(block)
        if block in order:
            order.remove(block)
            self._free[block] = None
        self._cached.forget(block)

    def _order_of(self, block: int) -> EvictionOrder:
        if self._passed and block in self._passed:
            return self._passed
        return self._spared if block in self._pinned else self._cached

    def _evict(self) -> int:
        if self._passed:
            block = self._passed.evict()
            self._cached.forget(block)
        elif self._cached:
            block = self._cached.evict()
        else:
            block = self._spared.evict()
            del self._pinned[block]
            self._cached.forget(block)
        self._indexed[block] = 0
        self.version += 1
        for call in self._on_evict:
            call(block)
        return block

    @property
    def findable(self) -> bytes:
        """Return a byte for each block: 1 if prompts find it."""
        return bytes(self._indexed)
