"""Which cached block is given up next. Four orders over the blocks that nobody holds but the prefix cache can find:

    lru     the one let go longest ago
    slru    the same, but blocks that were found again stand behind all others, in a segment of bounded size
    lfu     the one found least often; counts age, so what was popular once does not stay for ever
    cost    the one whose finds saved least computing: finding a block saves it and all that were found behind it

A sequence lets go of its tail before its head, and equals go in that order, so a chain is eaten from its end. Owned by
the block pool, engine thread.
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
    """Cached blocks, next to go first."""

    def add(self, block: int) -> None:
        """Nobody holds it any more."""
        ...

    def remove(self, block: int) -> None:
        """Somebody does again."""
        ...

    def evict(self) -> int:
        """Take out the next to go, of one at least, and forget what is known of it."""
        ...

    def forget(self, block: int) -> None:
        """Its content is gone: whatever was known of it is not to be the next one's. It is not, or not any more, here."""
        ...

    def found(self, blocks: Sequence[int]) -> None:
        """A prompt begins with these, in its order. They may be cached or held."""
        ...

    def __contains__(self, block: object) -> bool: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...


class Lru(OrderedDict[int, None]):
    """In the order they were let go. Finding a block changes nothing: its next holder will let it go last."""

    __slots__ = ()

    # The ordered dict's own methods: a Python function would cost as much again. A plain dict is no quicker at the
    # middle and takes 0.5 to 1.5 us to find its first key once others before it are gone; this one takes 0.1.
    add = OrderedDict.setdefault
    remove = OrderedDict.__delitem__

    def evict(self) -> int:
        """The oldest."""
        return self.popitem(last=False)[0]

    def forget(self, block: int) -> None:
        """Nothing is known."""

    def found(self, blocks: Sequence[int]) -> None:
        """Nothing to note."""


class Slru:
    """Two queues: a block enters the first, and the second once it was found.

    What is too much in the second falls back, and what stood there while the pool was turned over several times goes:
    else blocks that are found no more would stay as long as those of the first queue never live to be found.
    """

    __slots__ = ("_found", "_max_protected", "_num_evicted", "_patience", "_probation", "_protected")

    def __init__(self, num_blocks: int) -> None:
        self._max_protected = int(num_blocks * _PROTECTED_SHARE)
        self._patience = num_blocks * _MAX_TURNOVERS
        self._num_evicted = 0
        self._probation = Lru()
        self._protected: OrderedDict[int, int] = OrderedDict()  # and how many had been evicted when it was let go
        self._found: set[int] = set()

    def add(self, block: int) -> None:
        """To the young end of its queue; the old end of the second may fall back to the first."""
        if block not in self._found:
            self._probation.add(block)
            return
        self._protected[block] = self._num_evicted
        if len(self._protected) > self._max_protected:
            fallen = self._protected.popitem(last=False)[0]
            self._found.discard(fallen)
            self._probation.add(fallen)

    def remove(self, block: int) -> None:
        """From whichever it stands in."""
        if self._protected.pop(block, None) is None:
            self._probation.remove(block)

    def evict(self) -> int:
        """The oldest that was not found again, unless one that was has waited too long, or there is no other."""
        block = next(iter(self._protected), -1)
        if self._probation and (block < 0 or self._num_evicted - self._protected[block] < self._patience):
            block = self._probation.evict()
        else:
            del self._protected[block]
        self._num_evicted += 1
        self.forget(block)
        return block

    def forget(self, block: int) -> None:
        """The next content begins in the first queue."""
        self._found.discard(block)

    def found(self, blocks: Sequence[int]) -> None:
        """They will stand in the second queue."""
        self._found.update(blocks)

    def __contains__(self, block: object) -> bool:
        return block in self._probation or block in self._protected

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __iter__(self) -> Iterator[int]:
        """But for those that have waited too long, which may go before."""
        yield from self._probation
        yield from self._protected


class Ranked:
    """By a sort key: 1 for having been computed and what finding it was worth, above the key of the last one that went.

    The latter ages the counts (GreedyDual): whoever is let go starts above what was passed over for long.
    """

    __slots__ = ("_entries", "_floor", "_heap", "_next_tick", "_worth", "_worth_of")

    def __init__(self, worth: Callable[[int], int]) -> None:
        """`worth` is what it is worth to find a block, by how many are found from there on."""
        self._worth = worth
        self._worth_of: dict[int, int] = {}  # of blocks that were found
        self._floor = 0
        self._next_tick = 0
        self._entries: dict[int, tuple[int, int, int]] = {}  # block -> (key, tick, block)
        self._heap: list[tuple[int, int, int]] = []  # the same, and some that do not count any more

    def add(self, block: int) -> None:
        """With the key it has earned; of equals the one let go first goes first."""
        entry = (self._floor + 1 + self._worth_of.get(block, 0), self._next_tick, block)
        self._next_tick += 1
        self._entries[block] = entry
        heappush(self._heap, entry)

    def remove(self, block: int) -> None:
        """Its place in the heap stays behind, until it comes up or such are the most."""
        del self._entries[block]
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def evict(self) -> int:
        """The one with the smallest key."""
        entry = heappop(self._heap)
        while self._entries.get(entry[2]) != entry:
            entry = heappop(self._heap)
        self._floor, _, block = entry
        del self._entries[block]
        self.forget(block)
        return block

    def forget(self, block: int) -> None:
        """The next content has earned nothing."""
        self._worth_of.pop(block, None)

    def found(self, blocks: Sequence[int]) -> None:
        """Count; it shows when they are let go the next time."""
        worth_of = self._worth_of
        for num_behind, block in enumerate(reversed(blocks), start=1):
            worth_of[block] = worth_of.get(block, 0) + self._worth(num_behind)

    def __contains__(self, block: object) -> bool:
        return block in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[int]:
        return iter([block for _, _, block in sorted(self._entries.values())])


# A policy makes the order of a pool of so many blocks.
EVICTION_POLICIES: dict[str, Callable[[int], EvictionOrder]] = {
    "lru": lambda _: Lru(),
    "slru": Slru,
    "lfu": lambda _: Ranked(lambda _: 1),
    "cost": lambda _: Ranked(lambda num_behind: num_behind),  # they would be computed if it were gone
}
