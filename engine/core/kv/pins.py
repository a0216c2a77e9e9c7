"""Pinned prefixes: contents that are evicted last, until their time is over. Engine thread.

A pin is on a content, by its name, and not on a block. It applies in the pool, in host memory and in stores, survives
eviction, and applies again when the content is recomputed. At most a share of the pool's blocks is pinned; beyond it a
pin replaces the one that ends soonest, if that ends sooner than itself. A block is pinned only after one that is pinned
for at least as long: prefixes stay whole. A pin only orders eviction: a sequence that needs a block gets it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from heapq import heapify, heappop, heappush
from math import inf

from engine.core.kv.prefix_cache import BlockIndex
from engine.core.stats import Stats


class Pins:
    """The pinned contents; `until` has the end of each."""

    def __init__(self, stats: Stats, max_pinned: int) -> None:
        self._stats = stats
        self._max_pinned = max_pinned
        self.targets: list[BlockIndex] = []
        self.until: dict[bytes, float] = {}
        # The first to end is first; of those that end together, the furthest from its root. Some entries are outdated.
        self._heap: list[tuple[float, int, bytes]] = []
        self._num_kept = 0

    def keep(self, chain: Seq[bytes], index: int, until: float) -> bool:
        """Pin a chain's block `index` until a time, or as long as it is; False without a place."""
        digest = chain[index + 1]
        has_parent = not index or self.until.get(chain[index], -inf) >= until
        if not (has_parent and (digest in self.until or self._make_place(until))):
            self._stats.pins_refused += 1
            return False
        if digest not in self.until:
            for target in self.targets:
                target.pin(digest)
        if until > self.until.get(digest, -inf):
            self.until[digest] = until
            self._num_kept += 1
            heappush(self._heap, (until, -self._num_kept, digest))
            if len(self._heap) > 2 * len(self.until):
                self._heap = [entry for entry in self._heap if self.until.get(entry[2]) == entry[0]]
                heapify(self._heap)
        return True

    def expire(self, now: float) -> None:
        """Unpin contents whose time is over."""
        while self._heap and self._heap[0][0] <= now:
            until, _, digest = heappop(self._heap)
            if self.until.get(digest) == until:
                self._drop(digest)

    def _make_place(self, until: float) -> bool:
        if len(self.until) < self._max_pinned:
            return True
        while self._heap and self.until.get(self._heap[0][2]) != self._heap[0][0]:
            heappop(self._heap)
        if not self._heap or self._heap[0][0] >= until:
            return False
        self._drop(self._heap[0][2])
        return True

    def _drop(self, digest: bytes) -> None:
        del self.until[digest]
        for target in self.targets:
            target.unpin(digest)
