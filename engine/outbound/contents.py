"""Notes which contents the pool and the tiers behind it gain and lose, for KV events (kv_events.py). Engine thread.

A content is noted at a place once its bytes are there: in the pool when the step that computed it is committed, in a
tier when its copy has ended. Its loss is noted before the block is written again. `flush` passes the changes on.

Consumers need a block's tokens. A content whose tokens this process has not seen, as of a folder kept from an earlier
run, is therefore noted when a request has computed it or found it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import chain
from typing import NamedTuple

from engine.core.kv.manager import KVCacheManager
from engine.core.kv.prefix_cache import DIGEST_BYTES, Holdings, in_group
from engine.core.spans import Chain
from engine.core.types import Request

MAX_ROOTS = 1 << 16  # chains whose salts, owners and adapters are remembered


def group_of(name: bytes) -> int:
    """Return the group of layers that a block is of, by its name."""
    return name[DIGEST_BYTES] if len(name) > DIGEST_BYTES else 0


class BlockLocation(NamedTuple):
    """Where blocks are."""

    medium: str  # GPU is the pool, on a CPU too; CPU is host memory, STORAGE a store behind it
    group: int = 0  # of layers, see groups.py
    window: int = 0  # of the group; 0 is full attention, or recurrent state
    is_state: bool = False


class Origin(NamedTuple):
    """What keeps blocks of equal tokens apart, beside the tokens before them."""

    adapter: str = ""
    adapter_id: int | None = None
    extra: tuple[str, ...] = ()  # what is part of each block's name beside its parent and tokens ...
    first_extra: tuple[str, ...] = ()  # ... and of the first one's


class Content(NamedTuple):
    """What a full block holds."""

    name: bytes
    parent: bytes | None  # the name of the block before it
    tokens: array[int]
    origin: Origin
    extra: tuple[str, ...]  # what is part of its name beside its parent and tokens


class Change(NamedTuple):
    """A content that a place has gained or lost."""

    place: BlockLocation
    content: Content
    is_gain: bool


class Snapshot(NamedTuple):
    """All contents of all places; what was said before does not count."""

    contents: list[tuple[BlockLocation, list[Content]]]


Changes = list[Change | Snapshot]


class Contents:
    """The contents of every place whose tokens are known."""

    def __init__(self, kv: KVCacheManager, sink: Callable[[Changes], None]) -> None:
        """Have a manager, before its first request, report what it gains and loses; `sink` gets what has changed."""
        config = kv.config
        assert config.has_full, "names are of blocks of a group that keeps every position"
        self.suffixes = [
            [in_group(b"", group, part) for part in range(kind.num_parts)] for group, kind in enumerate(config.groups)
        ]
        windows = 0, *[window if window < config.max_model_len else 0 for window in config.windows]

        def places(medium: str) -> list[BlockLocation]:
            found = [BlockLocation(medium, group, window) for group, window in enumerate(windows)]
            return [*found, BlockLocation(medium, len(found), is_state=True)] if config.state_blocks else found

        self.pool, self.host = PlaceContents(self, places("GPU")), PlaceContents(self, places("CPU"))
        self.stores = {store.name: PlaceContents(self, places("STORAGE")) for store in config.stores}
        self._sink = sink
        self._tiers = [self.host, *self.stores.values()] if config.num_host_blocks else []
        self._changes: Changes = []
        self._origins: OrderedDict[bytes, Origin] = OrderedDict()
        kv.note_request, kv.tiers.host.holdings = self.note_request, self.host
        for index in kv.indexes:
            index.holdings = self.pool
        for name, store in kv.tiers.stores.items():
            store.holdings = self.stores[name]
            for slot in range(store.pool.num_blocks):
                if (kept := store.content(slot)) is not None:
                    store.holdings.arrive(kept)

    def note_request(self, request: Request, names: Sequence[bytes]) -> None:
        """Remember the salt, owner and adapter of a request's chain, which begins with `names`."""
        adapter, owner = request.params.adapter, request.cache_owner
        name, number = ("", None) if adapter is None else (adapter.name, int.from_bytes(adapter.digest[:4], "big") >> 1)
        # What stands for an owner, whose name is no consumer's business.
        mark = blake2b(owner.encode(), digest_size=8, person=b"quire.owner").hexdigest() if owner else ""
        extra = (name,) if name else ()
        first_extra = (*extra, *(part for part in (request.cache_salt, mark) if part))
        self._origins[names[0]] = Origin(name, number, extra, first_extra)
        self._origins.move_to_end(names[0])
        if len(self._origins) > MAX_ROOTS:
            self._origins.popitem(last=False)

    def flush(self) -> None:
        """Pass on what has changed."""
        if self._changes:
            changes, self._changes = self._changes, []
            self._sink(changes)

    def send_snapshot(self) -> None:
        """Pass on all that is known, in place of what was noted since the last flush."""
        self._changes = [Snapshot(self.snapshot())]
        self.flush()

    def snapshot(self) -> list[tuple[BlockLocation, list[Content]]]:
        """Return the contents of each place."""
        found: dict[BlockLocation, dict[bytes, Content]] = {}
        for each in (self.pool, self.host, *self.stores.values()):
            for place in each.places:
                found.setdefault(place, {})
            for name, content in each.known.items():
                if each.has(name):
                    found[each.place_of(name)][content.name] = content
        return [(place, list(contents.values())) for place, contents in found.items()]

    def describe(self, chain: Sequence[bytes], tokens: Sequence[int], index: int, size: int) -> Content | None:
        """Return what block `index` of a chain holds, or None if its root is not remembered."""
        origin, name = self._origins.get(chain[0]), chain[index + 1]
        if origin is None:
            return None
        extra = origin.extra if index else origin.first_extra
        if isinstance(chain, Chain) and index in chain.parts:
            extra = (*extra, chain.parts[index].hex())
        own = array("I", tokens[index * size : (index + 1) * size])
        return Content(name, chain[index] if index else None, own, origin, extra)

    def find(self, name: bytes) -> Content | None:
        """Return a content that some place has."""
        places = (self.pool, *self._tiers)
        names = (name[:DIGEST_BYTES] + suffix for suffix in chain(*self.suffixes))  # any group's block says what it is
        return next((each.known[other] for other in names for each in places if other in each.known), None)

    def seen(self, content: Content) -> None:
        """Note in the tiers what a content is that they may have without knowing it."""
        for tier in self._tiers:
            tier.seen(content)

    def changed(self, holdings: PlaceContents, name: bytes, content: Content, *, is_gain: bool) -> None:
        """Note a change of a content whose other parts are here; consumers know one medium STORAGE for all stores."""
        if not holdings.has(name, but=name):
            return
        place = holdings.place_of(name)
        if place.medium == "STORAGE":
            others = [each for each in self.stores.values() if each is not holdings]
            if any(each.has(name) for each in others):
                return
        self._changes.append(Change(place, content, is_gain))


class PlaceContents(Holdings):
    """The contents of the pool, or of a tier, in all groups. Consumers know a content of several blocks once all are here."""

    def __init__(self, contents: Contents, places: Sequence[BlockLocation]) -> None:
        self._all, self.places = contents, places
        self.known: dict[bytes, Content] = {}  # by the names of blocks
        self._coming: dict[bytes, Content | None] = {}  # their copies have not ended
        self._unseen: set[bytes] = set()  # here, but their tokens are not known

    def place_of(self, name: bytes) -> BlockLocation:
        """Return where a block is, by its name here."""
        return self.places[group_of(name)]

    def has(self, name: bytes, but: bytes = b"") -> bool:
        """Return whether all blocks of the content are here of which this is one, but for one of them."""
        suffixes = self._all.suffixes[group_of(name)]
        names = [name] if len(suffixes) == 1 else [name[:DIGEST_BYTES] + suffix for suffix in suffixes]
        return all(each == but or each in self.known for each in names)

    def compute(self, chain: Sequence[bytes], tokens: Sequence[int], index: int, size: int, group: int = 0) -> None:
        content = self._all.describe(chain, tokens, index, size)
        if content is not None:
            for suffix in self._all.suffixes[group]:
                self._gain(content.name + suffix, content)
            self._all.seen(content)

    def expect(self, name: bytes) -> None:
        self._coming[name] = self._all.find(name)

    def arrive(self, name: bytes) -> None:
        content = self._coming.pop(name, None) or self._all.find(name)
        if name in self.known:
            return
        if content is None:
            self._unseen.add(name)
        else:
            self._gain(name, content)

    def seen(self, content: Content) -> None:
        """Note what a content is that may be here, or on its way."""
        for suffix in chain(*self._all.suffixes) if self._unseen or self._coming else ():
            name = content.name + suffix
            if name in self._unseen:
                self._unseen.remove(name)
                self._gain(name, content)
            elif name in self._coming:
                self._coming[name] = content

    def lose(self, name: bytes) -> None:
        content = self.known.pop(name, None)
        if content is not None:
            self._all.changed(self, name, content, is_gain=False)
        else:
            self._coming.pop(name, None)
            self._unseen.discard(name)

    def _gain(self, name: bytes, content: Content) -> None:
        self.known[name] = content
        self._all.changed(self, name, content, is_gain=True)
