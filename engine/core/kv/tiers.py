"""Decides which blocks move between the pool, host memory and stores; transports move the bytes.

A store keeps blocks behind host memory, on a disk for example; core knows its name, size and content. Each block that
arrives in host memory is saved to every store that lacks it. A transfer alone holds the host block that it writes to
until it is reported, even if the waiting request ends. So late bytes never reach another owner. Engine thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from math import inf
from typing import NamedTuple, Protocol

from engine.core.budget import StepTime
from engine.core.config import SchedulerConfig
from engine.core.in_flight import InFlightStep
from engine.core.kv.groups import Group, last_boundary
from engine.core.kv.host_tier import HostTier
from engine.core.kv.pins import Pins
from engine.core.kv.prefix_cache import BlockIndex, name_block
from engine.core.sequence import Sequence
from engine.core.stats import Stats, TransferKind

# While the time to compute a prompt is unknown, it waits for its transfers for so many seconds, or for as long as computing it would
# take at so many tokens a second.
MAX_PARKED_S, MAX_PACE = 0.5, 10_000
MAX_TRANSFERS = 16  # under way, beyond which no save begins: a store that writes too slowly gets some blocks only


class Transfer(NamedTuple):
    """One block on its way between host memory and a store."""

    transfer_id: int
    tier: str  # the store's name
    kind: TransferKind
    name: bytes  # of the content
    host_block: int
    slot: int  # of the store


TransferEnd = tuple[Transfer, bool]  # a transfer that ended, and whether it succeeded


class News(NamedTuple):
    """Contents that others have put into a shared store, or taken from it."""

    gained: Seq[bytes]
    lost: Seq[bytes]


class Transport(Protocol):
    """Moves a store's bytes, beside the engine thread, which it never blocks."""

    def start(self, transfers: Iterable[Transfer]) -> None:
        """Queue transfers, loads first, to begin after the copies of all launched plans."""

    def finished(self, wait_s: float) -> list[TransferEnd]:
        """Return the transfers that ended; waits up to `wait_s` for the first."""

    def news(self) -> list[News]:
        """Return what others have changed in the store since the last call."""

    def close(self) -> None:
        """Finish what is queued, and release everything."""


class Tiers:
    """Host blocks, the stores' slots, and the transfers between them."""

    def __init__(self, config: SchedulerConfig, stats: Stats, pins: Pins, times: StepTime) -> None:
        self._stats, self._times = stats, times
        self._size = config.block_size
        num_host, share = config.num_host_blocks, config.pinned_share
        self.host = HostTier(num_host, config.block_size, pins.until, int(num_host * share))
        self.stores = {
            name: BlockIndex(num_slots, pins.until, int(num_slots * share)) for name, num_slots, _ in config.stores
        }
        self._shared = [store.name for store in config.stores if store.is_shared]
        pins.targets += (self.host, *self.stores.values())
        self._fresh: dict[bytes, int] = {}  # new blocks of the pool that were not spilled yet, oldest first
        self._staged: list[tuple[bytes, int, int]] = []  # (name, block, host block) of the last spill
        self._landed: dict[bytes, int] = {}  # host blocks that are to be saved, oldest first
        self._max_transfers = MAX_TRANSFERS + config.state_blocks  # a snapshot is worth nothing in parts
        self._num_begun = 0
        self._orders: list[Transfer] = []  # not yet given to a transport
        self._under_way: dict[tuple[TransferKind, str, bytes], Transfer] = {}  # until they are reported
        self._parked: dict[bytes, list[Sequence]] = {}  # sequences by the names that they wait for
        self._patience: list[tuple[Sequence, float]] = []  # how long sequences wait once their transfers begin

    # -- the pool and host memory --------------------------------------------------------------------------------------

    def appeared(self, name: bytes, block: int) -> None:
        """The prefix cache can find a block of the pool."""
        if self.stores:
            self._fresh[name] = block

    def leaves(self, name: bytes, block: int) -> None:
        """The pool evicts a cached block."""
        self._fresh.pop(name, None)
        self.host.offload(name, block)

    def pass_by(self, name: bytes) -> None:
        """Evict a content first: few prompts will find it again."""
        self._fresh.pop(name, None)
        self._landed.pop(name, None)
        for index in (self.host, *self.stores.values()):
            index.pass_by(name)

    def find(self, seq: Sequence, first: int) -> list[int]:
        """Return the host blocks that continue a sequence's tokens from block `first` on."""
        found: list[int] = []
        if self.host.pool.num_blocks and not self.host.is_given_up:
            for index in range(first, (len(seq.tokens) - 1) // self._size):
                host = self.host.find(name_block(seq.kv.chain, seq.tokens, index, self._size))
                if host < 0:
                    break
                found.append(host)
        return found

    def has(self, name: bytes) -> bool:
        """Return whether host memory has a block."""
        return self.host.find(name) >= 0 and not self.host.is_given_up

    def take(self, seq: Sequence, found: Seq[int], others: Seq[int]) -> None:
        """Hold the host blocks that a sequence is admitted with, and count them by tier; `others` are of other groups."""
        if not seq.is_resuming:
            seq.kv.num_from = {}
            for host in found:
                tier = self.host.origins.get(host, "host")
                seq.kv.num_from[tier] = seq.kv.num_from.get(tier, 0) + self._size
        for host in (*found, *others):
            self.host.origins.pop(host, None)
            self.host.pool.fork(host)

    def settle(self, step: InFlightStep, *, is_done: bool) -> None:
        """Take in the end of a step, committed or rolled back."""
        arrived = self.host.settle(step, is_done=is_done)
        if self.stores:
            self._landed.update(arrived)

    # -- host memory and the stores ------------------------------------------------------------------------------------

    def prefetch(self, seq: Sequence, others: Seq[Group], first: int, num_found: int) -> bool:
        """Start loading a prompt's blocks behind the first that stores have; returns whether to park it.

        It can begin with `num_found` blocks without them. It is parked for at most the time that computing them would take.
        """
        stop, needed = (0, []) if self.host.is_given_up else self._find_stored(seq, others, first)
        found = [host for name in needed if (host := self.host.find(name)) >= 0]
        for host in found:  # it shall not be evicted for those that are loaded
            self.host.pool.fork(host)
        for name in needed:
            if self.host.find(name) >= 0:
                continue
            tier = self._stored(name)
            if (TransferKind.LOAD, tier, name) not in self._under_way:
                if not self.host.pool.num_expendable:
                    break
                slot = self.stores[tier].find(name)
                self.stores[tier].pool.fork(slot)
                self._begin(TransferKind.LOAD, tier, name, self.host.pool.alloc(), slot)
            self._parked.setdefault(name, []).append(seq)
            seq.kv.num_awaited += 1
        self.host.pool.free(*reversed(found))
        seq.kv.num_coming = stop
        num_lacking = max(stop - num_found, 0)
        computed_s = self.compute_s(num_found, num_lacking)
        unknown_s = max(MAX_PARKED_S, num_lacking * self._size / MAX_PACE)
        self._patience.append((seq, unknown_s if computed_s == inf else computed_s))
        seq.kv.awaits_until_s = inf
        return seq.kv.num_awaited > 0

    def compute_s(self, first: int, num_blocks: int) -> float:
        """Return how long computing blocks of a prompt from `first` on would take; infinite while that is not known."""
        return self._times.chunk_s(first * self._size, num_blocks * self._size) if self._times.is_known else inf

    def _find_stored(self, seq: Sequence, others: Seq[Group], first: int) -> tuple[int, list[bytes]]:
        """Return the last boundary that tiers let a sequence resume from, and what it needs of them for that.

        The pool has the first blocks, up to `first`, of the first group.
        """
        stop, num_wanted = first, 0
        most = self.host.pool.num_blocks // 2 - sum([group.size_at(len(seq.tokens) // self._size) for group in others])
        for index in range(first, (len(seq.tokens) - 1) // self._size):
            name = name_block(seq.kv.chain, seq.tokens, index, self._size)
            if self.host.find(name) < 0:
                if num_wanted >= most or not self._stored(name):
                    break
                num_wanted += 1
            stop = index + 1
        chain = seq.kv.chain
        if others:
            stop = last_boundary(
                others, chain, stop, lambda name: self.host.find(name) >= 0 or bool(self._stored(name))
            )
        return stop, chain[first + 1 : stop + 1] + [name for group in others for name in group.lacking(chain, stop)]

    def _stored(self, name: bytes) -> str:
        """Return the first store that has a block; nothing without one."""
        return next((tier for tier, store in self.stores.items() if store.find(name) >= 0), "")

    @property
    def is_transferring(self) -> bool:
        """Return whether transfers are under way, or blocks wait to be saved."""
        return bool(self._under_way or (self._fresh and self._can_spill))

    def spill(self) -> list[tuple[int, int]]:
        """Return the copies to host memory of new blocks that are to be saved: (block, host block)."""
        self.unstage()
        while self._fresh and self._can_spill:
            name = next(iter(self._fresh))
            block = self._fresh.pop(name)
            if self.host.find(name) < 0 and self._lacking(name):
                self._staged.append((name, block, self.host.pool.alloc()))
        return [(block, host) for _, block, host in self._staged]

    def unstage(self) -> None:
        """Undo the last spill: its copies never happened."""
        for _, _, host in self._staged:
            self.host.pool.free(host)
        self._staged.clear()

    def start(self, now: float) -> list[Transfer]:
        """Return the transfers to begin; all plans made so far were launched."""
        for seq, seconds in self._patience:  # the step in which they were ordered may have taken longer
            seq.kv.awaits_until_s = now + seconds
        self._patience.clear()
        for name, _, host in self._staged:
            self._save(name, host)
        self.unstage()
        while self._landed and self._may_save:
            name = next(iter(self._landed))
            host = self._landed.pop(name)
            if self.host.has_content(name, host):
                self._save(name, host)
        orders, self._orders = self._orders, []
        return orders

    def finish(self, reports: Iterable[TransferEnd]) -> list[Sequence]:
        """Take in the ends of transfers; returns the sequences that wait for no other transfer."""
        ready: list[Sequence] = []
        for transfer, is_good in reports:
            _, tier, kind, name, host, slot = transfer
            if self._under_way.get((kind, tier, name)) != transfer:
                continue  # it was reported before
            del self._under_way[kind, tier, name]
            store = self.stores[tier]
            if kind is TransferKind.SAVE:
                if is_good:
                    self._put(store, name, slot)
            else:
                if not is_good:
                    store.forget(slot)  # a block that cannot be read once is not read again
                elif self.host.find(name) < 0:
                    self._put(self.host, name, host)
                    self.host.origins[host] = tier
                for seq in self._parked.pop(name, ()):
                    seq.kv.num_awaited -= 1
                    if not seq.kv.num_awaited:
                        ready.append(seq)
            self.host.pool.free(host)
            store.pool.free(slot)
            if is_good:
                self._stats.transferred[kind] += 1
            elif tier not in self._shared:  # where others may have replaced the block since
                self._stats.failed_transfers[kind] += 1
        return ready

    def restore(self, tier: str, kept: Iterable[tuple[bytes, int]]) -> None:
        """Index the blocks (name, slot) a store kept, oldest first. Called once, first."""
        store = self.stores[tier]
        slots = store.pool.alloc_many(store.pool.num_blocks)
        for name, slot in kept:
            self._put(store, name, slot)
            store.pool.free(slot)
        for slot in slots:
            if store.content(slot) is None:
                store.pool.free(slot)

    def learn(self, tier: str, news: News) -> None:
        """Take in what others have changed in a shared store."""
        store = self.stores[tier]
        for name in news.lost:
            store.forget(store.find(name))  # nothing, if it was not found
        for name in news.gained:
            if store.find(name) < 0 and store.pool.num_expendable:
                slot = store.pool.alloc()
                self._put(store, name, slot)
                store.pool.free(slot)

    @property
    def num_leaked(self) -> int:
        """Return how many host blocks and slots are held that neither tickets nor transfers have."""
        transfers = self._under_way.values()
        known = {("", host) for _, _, host in self._staged} | {("", each.host_block) for each in transfers}
        known |= {(each.tier, each.slot) for each in transfers}
        return sum(index.pool.num_held for index in (self.host, *self.stores.values())) - len(known)

    @staticmethod
    def _put(index: BlockIndex, name: bytes, block: int) -> None:
        """Make a content findable that has arrived."""
        index.put(name, block)
        index.holdings.arrive(name)

    @property
    def _may_save(self) -> bool:
        return len(self._under_way) + len(self._staged) < self._max_transfers

    @property
    def _can_spill(self) -> bool:
        return self._may_save and self.host.pool.num_expendable > 0 and not self.host.is_given_up

    def _lacking(self, name: bytes) -> list[str]:
        """Return the stores that lack a content and have room for it; none if a shared one has it."""
        if any(self.stores[tier].find(name) >= 0 for tier in self._shared):
            return []
        return [
            tier
            for tier, store in self.stores.items()
            if tier not in self._shared
            and store.find(name) < 0
            and (TransferKind.SAVE, tier, name) not in self._under_way
            and store.pool.num_expendable
        ]

    def _save(self, name: bytes, host: int) -> None:
        """Save a host block to every store that lacks it."""
        for tier in self._lacking(name):
            self.host.pool.fork(host)
            self._begin(TransferKind.SAVE, tier, name, host, self.stores[tier].pool.alloc())

    def _begin(self, kind: TransferKind, tier: str, name: bytes, host: int, slot: int) -> None:
        self._num_begun += 1
        transfer = Transfer(self._num_begun, tier, kind, name, host, slot)
        self._under_way[kind, tier, name] = transfer
        self._orders.append(transfer)
