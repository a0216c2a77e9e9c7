"""Takes in K/V of other engines, and finds what of a prompt is here for them. Engine thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from engine.core.config import SchedulerConfig
from engine.core.kv.groups import WindowGroup, last_boundary
from engine.core.kv.host_tier import HostTier
from engine.core.kv.prefix_cache import BlockIndex, PrefixCache, in_group
from engine.core.kv.snapshots import RecurrentGroup
from engine.core.page_table import NO_BLOCK


class Place(NamedTuple):
    """A block that a sequence needs to resume at a boundary."""

    group: int
    at: int  # the index of the block at whose end its content stands
    part: int = 0  # of the content

    def name(self, chain: Sequence[bytes]) -> bytes:
        """Return the block's name below the pool."""
        return in_group(chain[self.at + 1], self.group, self.part)


@dataclass(slots=True, eq=False)
class PrefixImport:
    """Blocks for K/V that another engine computed; none is in a page table."""

    chain: list[bytes]
    tokens: Sequence[int]
    hits: list[int]  # the prompt's first blocks, which were cached already
    places: Sequence[Place]  # of `blocks`
    blocks: list[int]  # that the K/V is to be written to

    @property
    def held(self) -> list[int]:
        """Return all blocks that it holds."""
        return self.hits + self.blocks


def places_at(config: SchedulerConfig, num_blocks: int) -> list[Place]:
    """Return the blocks that a sequence needs to resume at a boundary, those of the first group first."""
    size, found = config.block_size, [Place(0, index) for index in range(num_blocks)]
    for number, group in enumerate(config.groups[1:], start=1):
        window = range(max(num_blocks * size - group.window + 1, 0) // size, num_blocks)
        found += [Place(number, index, part) for index in window for part in range(group.num_parts)]
    return found


class PrefixImports:
    """Imports of prompts' beginnings that are not finished yet."""

    def __init__(
        self,
        cache: PrefixCache,
        others: Sequence[WindowGroup | RecurrentGroup],
        host: HostTier,
        config: SchedulerConfig,
    ) -> None:
        """`cache` is of the first group, and `others` are those behind it."""
        self._cache, self._others, self._pool, self._host = cache, others, cache.pool, host
        self._indexes: tuple[BlockIndex, ...] = (cache, *others)  # by the number of the group
        self._block_size, self._num_groups = config.block_size, config.num_paged_groups
        self._open: dict[PrefixImport, None] = {}

    @property
    def held(self) -> set[int]:
        """Return the blocks that imports hold."""
        return {block for each in self._open for block in each.held}

    def find_prefix(self, names: list[bytes], tokens: Sequence[int], num_blocks: int) -> int:
        """Return how many of a prompt's first blocks are cached, at most so many, with what resuming behind them needs."""
        chain = names.copy()
        num_found = len(self._cache.match(chain, tokens, num_blocks * self._block_size))
        return last_boundary(self._others, chain, num_found, lambda _: False)

    def find_places(self, names: list[bytes], places: Sequence[Place]) -> list[int]:
        """Return the cached blocks of a prompt, all of whose blocks have names, at the first of some places that are here."""
        found = (self._indexes[place.group].find(place.name(names)) for place in places)
        return list(takewhile(lambda block: block != NO_BLOCK, found))

    def begin(
        self, names: list[bytes], tokens: Sequence[int], places: Sequence[Place], *, reserve: int
    ) -> PrefixImport | None:
        """Hold blocks for what is lacking of a prompt's places, leaving `reserve` sequences a block of each group.

        The caller fills them, then calls `finish` or `cancel`. Until then no sequence finds or reuses them. Without room
        for all, the last are left out; None if some are of other groups.
        """
        chain, pool, num_full = names.copy(), self._pool, sum(not place.group for place in places)
        hits = self._cache.match(chain, tokens, num_full * self._block_size)
        for block in hits:
            pool.fork(block)
        lacking = places[len(hits) : num_full]
        others = [place for place in places[num_full:] if self._indexes[place.group].find(place.name(chain)) < 0]
        num_spare = max(pool.num_spare - reserve * self._num_groups, 0)
        if others and len(lacking) + len(others) > num_spare:
            pool.free(*reversed(hits))
            return None
        lacking = [*lacking, *others][:num_spare]
        blocks = pool.alloc_many(len(lacking), after=hits[-1] if hits else -1)
        self._host.overwritten(blocks)
        imported = PrefixImport(chain, tokens, hits, lacking, blocks)
        self._open[imported] = None
        return imported

    def finish(self, imported: PrefixImport) -> int:
        """Make imported and filled blocks findable; returns how many of the prompt's first blocks are cached."""
        if imported not in self._open:
            return 0
        chain, tokens, found = imported.chain, imported.tokens, list(imported.hits)
        contents = dict[tuple[int, int], list[int]]()
        for place, block in zip(imported.places, imported.blocks, strict=True):
            contents.setdefault((place.group, place.at), []).append(block)
        found += [block for (number, _), (block, *_) in contents.items() if not number]
        self._cache.register(chain, tokens, found, len(imported.hits), len(found))
        for (number, at), parts in contents.items():
            if number:
                self._others[number - 1].register(chain, tokens, at, parts)
                self._others[number - 1].branch(parts)
        self.cancel(imported)
        return len(found)

    def cancel(self, imported: PrefixImport) -> None:
        """Free an import's blocks, once nothing writes to them any more."""
        if imported in self._open:
            del self._open[imported]
            self._pool.free(*reversed(imported.held))
