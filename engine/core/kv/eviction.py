"""The eviction order of cached blocks without holders: four policies. Engine thread.

    lru     least recently released first
    slru    the same, but blocks that were found again are behind all others, in a segment of bounded size
    lfu     least often found first; counts age, so popularity ends
    cost    least computing saved first: finding a block saves it and all blocks found after it

A sequence releases its tail before its head, and equals keep that order, so a chain is evicted from its end.

Beside recurrent state, lru weighs what a block saves: a snapshot saves the computing since the snapshot before it, and
takes several blocks. One that saves less a byte than K/V does is evicted sooner, by as much.

    add        a block has lost its last holder
    remove     a block has a holder again
    evict      remove and return the next block, of at least one, and drop its statistics
    forget     drop the statistics of a block that is not here; its content was discarded
    found      a prompt begins with these blocks, in order; they may be cached or held
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from engine.core.errors import ConfigError

# Of slru, for blocks that were found again: their largest share of the pool, and how many times the pool's size is
# evicted before one that is not found again goes too.
_PROTECTED_SHARE = 0.8
_MAX_TURNOVERS = 4


class Lru(OrderedDict[int, None]):
    """Least recently released first; a find needs no note, because its holder releases it later."""

    # The ordered dict's methods: a Python function would double the cost. A plain dict is no faster in the middle and
    # takes 0.5 to 1.5 us to find its first key once others before it are gone; this one takes 0.1.
    add = OrderedDict.setdefault
    remove = OrderedDict.__delitem__

    def evict(self) -> int:
        return self.popitem(last=False)[0]

    def forget(self, block: int) -> None:
        """Do nothing: there are no statistics."""

    def found(self, blocks: Sequence[int]) -> None:
        """Do nothing: only the time of release counts."""


class Slru:
    """Two queues: a block enters the first one, and the second one after it was found.

    Blocks beyond the second queue's bound fall back to the first, and blocks that stayed there while the pool was
    turned over several times are evicted: they are no longer found.
    """

    def __init__(self, num_blocks: int) -> None:
        self._max_protected = int(num_blocks * _PROTECTED_SHARE)
        self._patience = num_blocks * _MAX_TURNOVERS
        self._num_evicted = 0
        self._probation = Lru()
        self._protected: OrderedDict[int, int] = OrderedDict()  # and the number of evictions when it was released
        self._found: set[int] = set()

    def add(self, block: int) -> None:
        """Add at the young end of its queue; the old end of the second may fall back to the first."""
        if block not in self._found:
            self._probation.add(block)
            return
        self._protected[block] = self._num_evicted
        if len(self._protected) > self._max_protected:
            fallen = self._protected.popitem(last=False)[0]
            self._found.discard(fallen)
            self._probation.add(fallen)

    def remove(self, block: int) -> None:
        if self._protected.pop(block, None) is None:
            self._probation.remove(block)

    def evict(self) -> int:
        """Remove and return the oldest not found again, unless a found one is too old or alone."""
        block = next(iter(self._protected), -1)
        if self._probation and (block < 0 or self._num_evicted - self._protected[block] < self._patience):
            block = self._probation.evict()
        else:
            del self._protected[block]
        self._num_evicted += 1
        self.forget(block)
        return block

    def forget(self, block: int) -> None:
        """Start the next content in the first queue."""
        self._found.discard(block)

    def found(self, blocks: Sequence[int]) -> None:
        """Send these blocks to the second queue at their next release."""
        self._found.update(blocks)

    def __contains__(self, block: object) -> bool:
        return block in self._probation or block in self._protected

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __iter__(self) -> Iterator[int]:
        """Yield in order, except that blocks that are too old may go earlier."""
        yield from self._probation
        yield from self._protected


class Ranked:
    """By a sort key: its weight, mostly 1, plus the worth of its finds, above the key of the last evicted block.

    Starting above the last evicted key ages the counts (GreedyDual): a released block starts above long unused ones.
    """

    def __init__(self, worth: Callable[[int], int], blocks: Iterable[int] = ()) -> None:
        """`worth` is the value of finding a block, by the number of blocks found from it on; `blocks` are added first."""
        self._worth = worth
        self._worth_of: dict[int, int] = {}  # of blocks that were found
        self._weight_of: dict[int, float] = {}  # where it is not 1
        self._floor = 0.0
        self._next_tick = 0
        self._entries: dict[int, tuple[float, int, int]] = {}  # block -> (key, tick, block)
        self._heap: list[tuple[float, int, int]] = []  # the same, with some outdated entries
        for block in blocks:
            self.add(block)

    def add(self, block: int) -> None:
        """Add with its earned key; of equals the one released first is evicted first."""
        key = self._floor + self._weight_of.get(block, 1) + self._worth_of.get(block, 0)
        entry = (key, self._next_tick, block)
        self._next_tick += 1
        self._entries[block] = entry
        heappush(self._heap, entry)

    def remove(self, block: int) -> None:
        """Remove; its heap entry stays until it comes up or outdated entries are the majority."""
        del self._entries[block]
        if len(self._heap) > 2 * len(self._entries):
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def evict(self) -> int:
        entry = heappop(self._heap)
        while self._entries.get(entry[2]) != entry:
            entry = heappop(self._heap)
        self._floor, _, block = entry
        del self._entries[block]
        self.forget(block)
        return block

    def forget(self, block: int) -> None:
        """Start the next content without any worth."""
        self._worth_of.pop(block, None)
        self._weight_of.pop(block, None)

    def weigh(self, block: int, weight: float) -> None:
        """Set how much the content saves, as a multiple of what a block of K/V does."""
        self._weight_of[block] = weight

    def found(self, blocks: Sequence[int]) -> None:
        """Count the finds; they apply at the blocks' next release."""
        worth_of = self._worth_of
        for num_behind, block in enumerate(reversed(blocks), start=1):
            worth_of[block] = worth_of.get(block, 0) + self._worth(num_behind)

    def __contains__(self, block: object) -> bool:
        return block in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[int]:
        return iter([block for _, _, block in sorted(self._entries.values())])


EvictionOrder = Lru | Slru | Ranked

# A policy returns the order for a pool of a given size.
EVICTION_POLICIES: dict[str, Callable[[int], EvictionOrder]] = {
    "lru": lambda _: Lru(),
    "slru": Slru,
    "lfu": lambda _: Ranked(lambda _: 1),
    "cost": lambda _: Ranked(lambda num_behind: num_behind),  # those blocks would be recomputed without it
}


def make_order(policy: str, num_blocks: int) -> EvictionOrder:
    """Return a policy's order for a pool of this size. Raises ConfigError for an unknown name."""
    if policy not in EVICTION_POLICIES:
        raise ConfigError(f"eviction is {policy!r}; choose one of {', '.join(EVICTION_POLICIES)}.")
    return EVICTION_POLICIES[policy](num_blocks)
