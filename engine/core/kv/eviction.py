"""The eviction order of cached blocks without holders: least recently released first. Engine thread.

A sequence releases its tail before its head, so a chain is evicted from its end.

Beside recurrent state the order weighs what a block saves: a snapshot saves the computing since the snapshot before it, and
takes several blocks. One that saves less a byte than K/V does is evicted sooner, by as much.

    add        a block has lost its last holder
    remove     a block has a holder again
    evict      remove and return the next block, of at least one, and drop its weight
    forget     drop the weight of a block that is not here; its content was discarded
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush


class Lru(OrderedDict[int, None]):
    """Least recently released first."""

    # The ordered dict's methods: a Python function would double the cost. A plain dict is no faster in the middle and
    # takes 0.5 to 1.5 us to find its first key once others before it are gone; this one takes 0.1.
    add = OrderedDict.setdefault
    remove = OrderedDict.__delitem__

    def evict(self) -> int:
        return self.popitem(last=False)[0]

    def forget(self, block: int) -> None:
        """Do nothing: there are no weights."""


class Weighed:
    """By a sort key: its weight, mostly 1, above the key of the last evicted block.

    Starting above the last evicted key ages the weights (GreedyDual): a released block starts above long unused ones.
    """

    def __init__(self, blocks: Iterable[int] = ()) -> None:
        """`blocks` are added first."""
        self._weight_of: dict[int, float] = {}  # where it is not 1
        self._floor = 0.0
        self._next_tick = 0
        self._entries: dict[int, tuple[float, int, int]] = {}  # block -> (key, tick, block)
        self._heap: list[tuple[float, int, int]] = []  # the same, with some outdated entries
        for block in blocks:
            self.add(block)

    def add(self, block: int) -> None:
        """Add with its weight's key; of equals the one released first is evicted first."""
        entry = (self._floor + self._weight_of.get(block, 1), self._next_tick, block)
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
        """Start the next content with the weight 1."""
        self._weight_of.pop(block, None)

    def weigh(self, block: int, weight: float) -> None:
        """Set how much the content saves, as a multiple of what a block of K/V does."""
        self._weight_of[block] = weight

    def __contains__(self, block: object) -> bool:
        return block in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[int]:
        return iter([block for _, _, block in sorted(self._entries.values())])


EvictionOrder = Lru | Weighed
