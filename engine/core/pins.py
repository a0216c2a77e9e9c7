"""Pinned prefixes: which contents are to be given up last, until when, and on whose account.

Blocks are named by digest, so a pin is on what a block holds and not on a place: it finds the block in the pool, in host
memory and on the disk, outlasts its eviction, and takes hold again wherever the content comes up anew (in an answer, once
somebody asks for it: until then that has no name). Five rules:

    bound      at most so many contents at once, a share of the pool, and of each one end and one holder: many may pin the same
    order      whoever pins a block has pinned the one before it, for at least as long: prefixes stay whole
    own        beyond the bound a pin takes the place of the owner's own that ends soonest, and sooner than itself
    fair       or of one of whoever has most for its weight, if that is more than this owner would have
    common     what a second owner pins too is on nobody's account from then on, until the last end that was asked for

The operator's end never, are common too, and nobody takes the place of what is. A pin is a wish about eviction only: whoever
runs and needs a block gets it. Owned by the scheduler, engine thread; knows no clock, only the times it is told.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from heapq import heapify, heappop, heappush
from math import inf
from typing import Protocol

from engine.core.stats import Stats


class Shelf(Protocol):
    """Blocks that are findable by content. It asks of each that appears whether it is pinned."""

    def pin(self, digest: bytes) -> None:
        """If this is here, it goes last."""
        ...

    def unpin(self, digest: bytes) -> None:
        """It does not any more."""
        ...


class _Ends:
    """Until when what is pinned; the first to end is at hand, and of those that end together the furthest from its root."""

    __slots__ = ("_heap", "_num_kept", "until")

    def __init__(self) -> None:
        self.until: dict[bytes, float] = {}
        self._heap: list[tuple[float, int, bytes]] = []  # with some that were prolonged or left since
        self._num_kept = 0

    @property
    def first(self) -> tuple[float, bytes]:
        """When the next one ends, and which; of one at least."""
        while self.until.get(self._heap[0][2]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0], self._heap[0][2]

    def keep(self, digest: bytes, until: float) -> None:
        self.until[digest] = until
        self._num_kept += 1
        heappush(self._heap, (until, -self._num_kept, digest))
        if len(self._heap) > 2 * len(self.until) + 64:
            self._heap = [entry for entry in self._heap if self.until.get(entry[2]) == entry[0]]
            heapify(self._heap)


class _Owner(_Ends):
    """What is on one's account."""

    __slots__ = ("name", "weight")

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.name = name
        self.weight = 1.0

    @property
    def load(self) -> float:
        return len(self.until) / self.weight


class Pins:
    """The book of them. `digest in pins` is what shelves ask."""

    __slots__ = ("_common", "_ends", "_holder_of", "_max_pinned", "_next_end_s", "_owners", "_stats", "shelves")

    def __init__(self, stats: Stats, max_pinned: int = 0) -> None:
        self._stats = stats
        self.shelves: list[Shelf] = []
        self.clear(max_pinned)

    def clear(self, max_pinned: int) -> None:
        """Nothing is pinned, and so much may be: contents have other names now."""
        self._max_pinned = max_pinned
        self._owners: dict[str, _Owner] = {}  # of one at least each
        self._common = _Owner()
        self._holder_of: dict[bytes, _Owner] = {}
        self._ends = _Ends()  # of all, whoever holds them
        self._next_end_s = inf  # or sooner

    def __contains__(self, digest: object) -> bool:
        return digest in self._holder_of

    def __len__(self) -> int:
        return len(self._holder_of)

    def keep(self, chain: Seq[bytes], index: int, until: float, name: str = "", weight: float = 1.0) -> bool:
        """Pin a chain's block `index` until then, or for as long as it is already; False if there is no place for it.

        An `until` without end is the operator's.
        """
        digest = chain[index + 1]
        owner = self._common if until == inf else self._owners.get(name) or _Owner(name)
        owner.weight = weight
        holder = self._holder_of.get(digest)
        has_parent = not index or self._has(owner, chain[index], until)
        if not (has_parent and (holder is not None or self._make_place(owner, until))):
            self._stats.pins_refused += 1
            return False
        self._hold(digest, owner if holder is None or holder is owner else self._common, until)
        return True

    def expire(self, now: float) -> None:
        """Let go of what has ended; to be called often, for it costs a comparison, and what has ended."""
        if now < self._next_end_s:
            return
        while self._ends.until and self._ends.first[0] <= now:
            self._drop(self._ends.first[1])
        self._next_end_s = self._ends.first[0] if self._ends.until else inf

    def _has(self, owner: _Owner, digest: bytes, until: float) -> bool:
        """Is it pinned at least so long, by this owner or by several?"""
        return self._holder_of.get(digest) in (owner, self._common) and self._ends.until[digest] >= until

    def _make_place(self, owner: _Owner, until: float) -> bool:
        """For one more of an owner's; taken from others' only as far as they have more than it will have."""
        if len(self._holder_of) < self._max_pinned:
            return True
        giver = max(self._owners.values(), key=lambda other: other.load, default=owner)
        if owner is self._common or giver.load <= (len(owner.until) + 1) / owner.weight:
            giver = owner
        # Nothing common is taken: others' prefixes may go on from it.
        if giver is self._common or not giver.until or (giver is owner and giver.first[0] >= until):
            return False
        self._drop(giver.first[1])
        return True

    def _hold(self, digest: bytes, holder: _Owner, until: float) -> None:
        """Put it on that account, for as long as either was asked."""
        before, end = self._holder_of.get(digest), self._ends.until.get(digest, -inf)
        if before is holder and until <= end:
            return
        if before is None:
            for shelf in self.shelves:
                shelf.pin(digest)
        elif before is not holder:
            self._take(digest, before)
        if until > end:
            self._ends.keep(digest, until)
            self._next_end_s = min(self._next_end_s, until)
        holder.keep(digest, max(until, end))
        self._holder_of[digest] = holder
        if holder is not self._common:
            self._owners[holder.name] = holder

    def _take(self, digest: bytes, holder: _Owner) -> None:
        del holder.until[digest]
        if not holder.until and holder is not self._common:
            del self._owners[holder.name]

    def _drop(self, digest: bytes) -> None:
        self._take(digest, self._holder_of.pop(digest))
        del self._ends.until[digest]
        for shelf in self.shelves:
            shelf.unpin(digest)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the counts add up and the bound holds."""
        holders = (*self._owners.values(), self._common)
        assert len(self._holder_of) <= self._max_pinned, "more is pinned than may be"
        assert self._holder_of == {digest: holder for holder in holders for digest in holder.until}
        assert self._ends.until == {digest: until for holder in holders for digest, until in holder.until.items()}
        assert sum(len(holder.until) for holder in holders) == len(self._holder_of), "one content is held twice"
        assert all(name == owner.name and owner.until for name, owner in self._owners.items())
