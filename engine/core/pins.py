"""Pinned prefixes: which contents are to be given up last, until when, and on whose account.

Blocks are named by digest, so a pin is on what a block holds and not on a place: it finds the block in the pool, in host
memory and on the disk, outlasts its eviction, and takes hold again wherever the content comes up anew. Four rules:

    bound      at most so many contents at once, a share of the pool; one that several pin is on nobody's account
    order      whoever pins a block has pinned the one before it, for at least as long: prefixes stay whole
    own        beyond the bound a pin takes the place of the owner's own that ends soonest, and sooner than itself
    fair       or of one of whoever has most for its weight, if that is more than this owner would have

The operator's end never, and nobody's take their places. A pin is a wish about eviction only: whoever runs and needs a
block gets it. Owned by the scheduler, engine thread; knows no clock, only the times it is told.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from heapq import heapify, heappop, heappush
from math import inf
from typing import Protocol

from engine.core.stats import Stats

_LOOK_S = 1.0  # how often to look for what has ended; a pin may last so much longer


class Shelf(Protocol):
    """Blocks that are findable by content. It asks of each that appears whether it is pinned."""

    def pin(self, digest: bytes) -> None:
        """If this is here, it goes last."""
        ...

    def unpin(self, digest: bytes) -> None:
        """It does not any more."""
        ...


class _Owner:
    """What one has pinned; the first to end is at hand, and of those that end together the furthest from its root."""

    __slots__ = ("_heap", "_num_kept", "num_alone", "until", "weight")

    def __init__(self) -> None:
        self.weight = 1.0
        self.num_alone = 0  # of them, those that nobody else has pinned
        self.until: dict[bytes, float] = {}
        self._heap: list[tuple[float, int, bytes]] = []  # with some that were prolonged since
        self._num_kept = 0

    @property
    def load(self) -> float:
        return self.num_alone / self.weight

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


class Pins:
    """The book of them. `digest in pins` is what shelves ask."""

    __slots__ = ("_max_pinned", "_next_look_s", "_operators", "_owners", "_owners_of", "_stats", "shelves")

    def __init__(self, stats: Stats, max_pinned: int = 0) -> None:
        self._stats = stats
        self.shelves: list[Shelf] = []
        self.clear(max_pinned)

    def clear(self, max_pinned: int) -> None:
        """Nothing is pinned, and so much may be: contents have other names now."""
        self._max_pinned = max_pinned
        self._owners: dict[str, _Owner] = {}
        self._operators = _Owner()  # whose end never
        self._owners_of: dict[bytes, list[_Owner]] = {}
        self._next_look_s = inf

    def __contains__(self, digest: object) -> bool:
        return digest in self._owners_of

    def __len__(self) -> int:
        return len(self._owners_of)

    def keep(self, chain: Seq[bytes], index: int, until: float, name: str = "", weight: float = 1.0) -> bool:
        """Pin a chain's block `index` until then, or for as long as it is already; False if there is no place for it.

        An `until` without end is the operator's.
        """
        digest = chain[index + 1]
        owner = self._operators if until == inf else self._owners.setdefault(name, _Owner())
        owner.weight = weight
        has_parent = not index or owner.until.get(chain[index], -inf) >= until
        if not (has_parent and (digest in self._owners_of or self._make_place(owner, until))):
            self._stats.pins_refused += 1
            self._drop_if_idle(name)
            return False
        before = owner.until.get(digest)
        if before is None:
            self._add(owner, digest)
        if before is None or before < until:
            owner.keep(digest, until)
            self._next_look_s = min(self._next_look_s, until)
        return True

    def expire(self, now: float) -> None:
        """Let go of what has ended; to be called often, for it costs a comparison."""
        if now < self._next_look_s:
            return
        for name, owner in list(self._owners.items()):
            while owner.until and owner.first[0] <= now:
                self._drop(owner, owner.first[1])
            self._drop_if_idle(name)
        ends = min([owner.first[0] for owner in self._owners.values()], default=inf)
        self._next_look_s = max(ends, now + _LOOK_S)

    def _make_place(self, owner: _Owner, until: float) -> bool:
        """For one more of an owner's; taken from others' only as far as they have more than it will have."""
        if len(self._owners_of) < self._max_pinned:
            return True
        giver = max(self._owners.values(), key=lambda other: other.load, default=owner)
        if owner is self._operators or giver.load <= (owner.num_alone + 1) / owner.weight:
            giver = owner
        while len(self._owners_of) >= self._max_pinned:  # what others have too goes on being pinned
            if not giver.until or (giver is owner and giver.first[0] >= until):
                return False
            self._drop(giver, giver.first[1])
        return True

    def _add(self, owner: _Owner, digest: bytes) -> None:
        owners = self._owners_of.setdefault(digest, [])
        owners.append(owner)
        if len(owners) == 1:
            owner.num_alone += 1
            for shelf in self.shelves:
                shelf.pin(digest)
        elif len(owners) == 2:
            owners[0].num_alone -= 1

    def _drop(self, owner: _Owner, digest: bytes) -> None:
        del owner.until[digest]
        owners = self._owners_of[digest]
        owners.remove(owner)
        if len(owners) == 1:
            owners[0].num_alone += 1
        elif not owners:
            owner.num_alone -= 1
            del self._owners_of[digest]
            for shelf in self.shelves:
                shelf.unpin(digest)

    def _drop_if_idle(self, name: str) -> None:
        if name in self._owners and not self._owners[name].until:
            del self._owners[name]

    def check_integrity(self) -> None:
        """Raise AssertionError unless the counts add up and the bound holds."""
        assert len(self._owners_of) <= self._max_pinned, "more is pinned than may be"
        for owner in (*self._owners.values(), self._operators):
            assert owner.until.keys() == {digest for digest, owners in self._owners_of.items() if owner in owners}
            assert owner.num_alone == sum(self._owners_of[digest] == [owner] for digest in owner.until)
