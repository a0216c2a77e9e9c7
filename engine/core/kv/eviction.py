"""Which cached block is evicted next: four orders over the blocks without holders.

    lru     the block freed longest ago
    slru    the same, but blocks that were found again are evicted after all others, from a segment of bounded size
    lfu     the block found least often; counts age, so that a block that was popular once does not stay forever
    cost    the block whose finds saved least computing: a find saves the block and all that were found behind it

A sequence frees its tail before its head, and equals are evicted in that order, so a chain is shortened from its end.
Owned by the block pool, engine thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

# Of slru, for blocks that were found again: the share of the pool they have at most, and how many times its size may be
# evicted while one waits to be found once more.
_PROTECTED_SHARE = 0.8
_MAX_TURNOVERS = 4


class EvictionOrder(Protocol):
    """Cached blocks, the next to be evicted first."""

    def add(self, block: int) -> None:
        """Add a block that has no holder any more."""
        ...

    def remove(self, block: int) -> None:
        """Remove a block that has a holder again."""
        ...

    def evict(self) -> int:
        """Remove and return the next block, and drop its statistics; there is at least one."""
        ...

    def forget(self, block: int) -> None:
        """Drop the statistics of a block whose content was discarded. The block is not in the order."""
        ...

    def found(self, blocks: Sequence[int]) -> None:
        """Note the blocks that a prompt begins with, in its order. They may be cached or held."""
        ...

    def __contains__(self, block: object) -> bool: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...


class Lru(OrderedDict[int, None]):
    """Blocks in the order they were freed. A find changes nothing: its holder will free the block last."""

    __slots__ = ()

    # The ordered dict's own methods: a Python function would cost as much again. A plain dict is no quicker at the
    # middle and takes 0.5 to 1.5 us to find its first key once others before it are gone; this one takes 0.1.
    add = OrderedDict.setdefault
    remove = OrderedDict.__delitem__

    def evict(self) -> int:
        """Remove and return the oldest."""
        return self.popitem(last=False)[0]

    def forget(self, block: int) -> None:
        """There are no statistics."""

    def found(self, blocks: Sequence[int]) -> None:
        """Ignore finds."""


class Slru:
    """Two queues: a block enters the first, and the second once it was found.

    If the second is too large, its oldest falls back. A block that stayed in it while the pool was turned over several
    times is evicted; otherwise blocks that are found no more would stay while those of the first queue die too young.
    """

    __slots__ = ("_found", "_max_protected", "_num_evicted", "_patience", "_probation", "_protected")

    def __init__(self, num_blocks: int) -> None:
        self._max_protected = int(num_blocks * _PROTECTED_SHARE)
        self._patience = num_blocks * _MAX_TURNOVERS
        self._num_evicted = 0
        self._probation = Lru()
        self._protected: OrderedDict[int, int] = OrderedDict()  # and the evictions until it was freed
        self._found: set[int] = set()

    def add(self, block: int) -> None:
        """Add to the young end of the block's queue; the oldest of the second may fall back to the first."""
        if block not in self._found:
            self._probation.add(block)
            return
        self._protected[block] = self._num_evicted
        if len(self._protected) > self._max_protected:
            fallen = self._protected.popitem(last=False)[0]
            self._found.discard(fallen)
            self._probation.add(fallen)

    def remove(self, block: int) -> None:
        """Remove from the queue that the block is in."""
        if self._protected.pop(block, None) is None:
            self._probation.remove(block)

    def evict(self) -> int:
        """Evict the oldest of the first queue, unless one of the second stayed too long or there is no other."""
        block = next(iter(self._protected), -1)
        if self._probation and (block < 0 or self._num_evicted - self._protected[block] < self._patience):
            block = self._probation.evict()
        else:
            del self._protected[block]
        self._num_evicted += 1
        self.forget(block)
        return block

    def forget(self, block: int) -> None:
        """Have the block's next content begin in the first queue."""
        self._found.discard(block)

    def found(self, blocks: Sequence[int]) -> None:
        """Have these blocks enter the second queue."""
        self._found.update(blocks)

    def __contains__(self, block: object) -> bool:
        return block in self._probation or block in self._protected

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __iter__(self) -> Iterator[int]:
        """Iterate in order of eviction, except for blocks that stayed too long, which may go before."""
        yield from self._probation
        yield from self._protected


class Ranked:
    """Blocks by a key: 1 for being computed, plus the worth of its finds, plus the key of the last evicted block.

    The last part ages the counts (GreedyDual): a block that is freed now starts above blocks that were unused for long.
    """

    __slots__ = ("_entries", "_floor", "_heap", "_next_tick", "_worth", "_worth_of")

    def __init__(self, worth: Callable[[int], int]) -> None:
        """`worth` returns the worth of finding a block, from the number of blocks found from there on."""
        self._worth = worth
        self._worth_of: dict[int, int] = {}  # of blocks that were found
        self._floor = 0
        self._next_tick = 0
        self._entries: dict[int, tuple[int, int, int]] = {}  # block -> (key, tick, block)
        self._heap: list[tuple[int, int, int]] = []  # the same, and outdated ones

    def add(self, block: int) -> None:
        """Add with the key that the block has earned; of equals, the one freed first is evicted first."""
        entry = (self._floor + 1 + self._worth_of.get(block, 0), self._next_tick, block)
        self._next_tick += 1
        self._entries[block] = entry
        heappush(self._heap, entry)

    def remove(self, block: int) -> None:
        """Remove a block; its heap entry stays until it is popped or most entries are outdated."""
        del self._entries[block]
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def evict(self) -> int:
        """Remove and return the block with the smallest key."""
        entry = heappop(self._heap)
        while self._entries.get(entry[2]) != entry:
            entry = heappop(self._heap)
        self._floor, _, block = entry
        del self._entries[block]
        self.forget(block)
        return block

    def forget(self, block: int) -> None:
        """Drop the worth of the block's finds."""
        self._worth_of.pop(block, None)

    def found(self, blocks: Sequence[int]) -> None:
        """Count a find; it has an effect when the blocks are freed next."""
        worth_of = self._worth_of
        for num_behind, block in enumerate(reversed(blocks), start=1):
            worth_of[block] = worth_of.get(block, 0) + self._worth(num_behind)

    def __contains__(self, block: object) -> bool:
        return block in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[int]:
        return iter([block for _, _, block in sorted(self._entries.values())])


# A policy makes the order for a pool of so many blocks.
EVICTION_POLICIES: dict[str, Callable[[int], EvictionOrder]] = {
    "lru": lambda _: Lru(),
    "slru": Slru,
    "lfu": lambda _: Ranked(lambda _: 1),
    "cost": lambda _: Ranked(lambda num_behind: num_behind),  # all of them would be recomputed without it
}
