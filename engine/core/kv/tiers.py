"""Where blocks that the pool gives up still are: in host memory, and on a disk behind it. The books; others move bytes.

    leaves     a cached block of the pool is about to be written to: the next plan copies it to a host block first
    find       host blocks that go on where the pool's end; the plan that admits their sequence copies them in
    prefetch   a request was queued whose prompt goes on on the disk: that is read into host blocks meanwhile
    spill      in an idle moment what is new in the pool goes to the disk too, so that it survives the process

What has come to a host block goes on to the disk. Host blocks are one pool with those of preempted sequences, who come
first; what is only cached takes no pinned one's place. Owned by the scheduler, engine thread; a BlockStore's own thread carries out what is between host and disk.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from engine.core.config import SchedulerConfig
from engine.core.in_flight import InFlightStep
from engine.core.kv.host_tier import HostTier
from engine.core.kv.pins import Pins
from engine.core.kv.prefix_cache import name_block
from engine.core.kv.tier import Tier
from engine.core.sequence import Sequence
from engine.core.stats import Stats, TransferKind
from engine.core.step_time import StepTime

MAX_AWAITED_S = 0.5  # that a request waits for the disk, while it is not known what computing takes
MAX_STORES = 16  # on their way to the disk at once; of what comes faster than a disk writes, some is not kept


class Transfer(NamedTuple):
    """One block between host memory and the disk."""

    kind: TransferKind
    digest: bytes
    host_block: int
    slot: int


class BlockStore(Protocol):
    """A disk. Transfers are carried out beside the engine thread."""

    def start(self, transfers: Iterable[Transfer]) -> None:
        """Queue them, fetches first. None begins before the copies of all plans that were launched are done."""
        ...

    def finished(self, wait_s: float) -> list[tuple[Transfer, bool]]:
        """Those that ended since the last call, and whether well; waits so long for one if there is none."""
        ...

    def close(self) -> None:
        """Finish what is queued, and let go."""
        ...


class Tiers:
    """Host blocks, disk slots, and what moves between them."""

    def __init__(self, config: SchedulerConfig, stats: Stats, pins: Pins, times: StepTime) -> None:
        self._stats = stats
        self._size = config.block_size
        self._times = times
        num_host, num_disk, share = config.num_host_blocks, config.num_disk_blocks, config.pinned_share
        self.host = HostTier(num_host, config.block_size, config.eviction, pins, int(num_host * share))
        self.disk = Tier(num_disk, "lru", pins, int(num_disk * share))
        pins.targets += (self.host, self.disk)
        self._fresh: dict[bytes, int] = {}  # blocks of the pool that came since and were not spilled, oldest first
        self._landed: dict[bytes, int] = {}  # host blocks that are to go to the disk, oldest first
        self._staged: list[tuple[int, Transfer]] = []  # blocks of the pool that the last spill copies to the host
        self._orders: list[Transfer] = []  # for the store, which has not been told yet
        self._under_way: dict[bytes, Transfer] = {}  # and these, until they end
        self._waiting: dict[bytes, list[Sequence]] = {}  # for what is fetched
        self._unused: set[int] = set()  # host blocks that were fetched and found by nobody since

    # -- the pool and host memory --------------------------------------------------------------------------------------

    def appeared(self, digest: bytes, block: int) -> None:
        """The prefix cache can find a block."""
        if self.disk.pool.num_blocks:
            self._fresh[digest] = block

    def leaves(self, digest: bytes, block: int) -> None:
        """The prefix cache gives a block up: have it copied, unless the host has it."""
        self._fresh.pop(digest, None)
        self.host.offload(digest, block)

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

    def take(self, seq: Sequence, found: Seq[int]) -> None:
        """Hold the host blocks that a sequence is admitted with, and note which tier they came from."""
        if not seq.is_resuming:
            seq.kv.num_from_disk = self._size * len(self._unused.intersection(found))
            seq.kv.num_from_host = self._size * len(found) - seq.kv.num_from_disk
        self._unused.difference_update(found)
        self.host.pool.found(found)
        for host in found:
            self.host.pool.fork(host)

    def settle(self, step: InFlightStep, *, is_done: bool) -> None:
        """Take in the end of a step, committed or rolled back."""
        arrived = self.host.settle(step, is_done=is_done)
        if self.disk.pool.num_blocks:
            self._landed.update(arrived)

    # -- host memory and the disk --------------------------------------------------------------------------------------

    def prefetch(self, seq: Sequence, first: int, now: float) -> None:
        """Have read what the disk has of a prompt behind its first blocks.

        The sequence waits for it, and who is behind it too, but no longer than that would take to compute.
        """
        host, wanted = self.host, list[bytes]()
        for index in range(first, (len(seq.tokens) - 1) // self._size):
            digest = name_block(seq.kv.chain, seq.tokens, index, self._size)
            if host.find(digest) < 0:
                if self.disk.find(digest) < 0 or len(wanted) >= host.pool.num_blocks // 2:
                    break
                wanted.append(digest)
        if not wanted or host.is_given_up:
            return
        for digest in wanted:
            if digest not in self._under_way:
                if not host.pool.num_expendable:
                    break
                slot = self.disk.find(digest)
                self.disk.pool.fork(slot)
                self._order(Transfer(TransferKind.FETCH, digest, host.pool.alloc(), slot))
            self._waiting.setdefault(digest, []).append(seq)
            seq.kv.num_awaited += 1
        computed_s = self._times.chunk_s(first * self._size, len(wanted) * self._size)
        seq.kv.awaits_until_s = now + (computed_s if self._times.is_known else MAX_AWAITED_S)

    @property
    def is_fetching(self) -> bool:
        """True while a sequence may wait for what is on its way."""
        return bool(self._waiting)

    @property
    def is_transferring(self) -> bool:
        """True while anything is on its way, or is to go."""
        return bool(self._under_way or (self._fresh and self._spills))

    def spill(self) -> list[tuple[int, int]]:
        """What is to be copied to the host at once, so that it can go to the disk: (block of the pool, host block)."""
        self.unstage()
        while self._fresh and self._spills:
            digest = next(iter(self._fresh))
            block = self._fresh.pop(digest)
            if self.host.find(digest) < 0 and self._lacks(digest):
                transfer = Transfer(TransferKind.STORE, digest, self.host.pool.alloc(), self.disk.pool.alloc())
                self._staged.append((block, transfer))
        return [(block, transfer.host_block) for block, transfer in self._staged]

    def unstage(self) -> None:
        """The copies of the last spill never came about."""
        for _, transfer in self._staged:
            self.host.pool.free(transfer.host_block)
            self.disk.pool.free(transfer.slot)
        self._staged.clear()

    def take_orders(self) -> list[Transfer]:
        """What the store is to begin: of the plans made so far, all were launched."""
        for _, transfer in self._staged:
            self._order(transfer)
        self._staged.clear()
        while self._landed and self._takes_stores:
            digest = next(iter(self._landed))
            host = self._landed.pop(digest)
            if self.host.has_content(digest, host) and self._lacks(digest):
                self.host.pool.fork(host)
                self._order(Transfer(TransferKind.STORE, digest, host, self.disk.pool.alloc()))
        orders, self._orders = self._orders, []
        return orders

    def finish(self, transfer: Transfer, *, is_good: bool) -> None:
        """The store is done with one."""
        kind, digest, host, slot = transfer
        del self._under_way[digest]
        if kind is TransferKind.FETCH and not is_good:
            self.disk.forget(slot)  # what cannot be read once is not asked for again
        elif kind is TransferKind.FETCH and self.host.find(digest) < 0:
            self.host.put(digest, host)
            self._unused.add(host)
        elif kind is TransferKind.STORE and is_good:
            self.disk.put(digest, slot)
        self.host.pool.free(host)
        self.disk.pool.free(slot)
        for seq in self._waiting.pop(digest, ()):
            seq.kv.num_awaited -= 1
        counts = self._stats.transferred if is_good else self._stats.failed_transfers
        counts[kind] += 1

    def restore(self, kept: Iterable[tuple[bytes, int]]) -> None:
        """What a disk has from before, (digest, slot), oldest first. Once, before anything else."""
        slots = self.disk.pool.alloc_many(self.disk.pool.num_blocks)
        for digest, slot in kept:
            self.disk.put(digest, slot)
            self.disk.pool.free(slot)
        for slot in slots:
            if self.disk.content(slot) is None:
                self.disk.pool.free(slot)

    def check_integrity(self, holders: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless `holders` and the transfers hold what is held of host blocks and slots."""
        transfers = [*self._under_way.values(), *(transfer for _, transfer in self._staged)]
        self.host.check_integrity([*holders, [transfer.host_block for transfer in transfers]])
        self.disk.check_integrity([[transfer.slot for transfer in transfers]])
        assert self._waiting.keys() <= self._under_way.keys(), "somebody waits for what nobody fetches"

    @property
    def _spills(self) -> bool:
        return self._takes_stores and self.host.pool.num_expendable > 0 and not self.host.is_given_up

    @property
    def _takes_stores(self) -> bool:
        return len(self._under_way) + len(self._staged) < MAX_STORES and self.disk.pool.num_expendable > 0

    def _lacks(self, digest: bytes) -> bool:
        """The disk has not got it, nor is it on its way."""
        return self.disk.find(digest) < 0 and digest not in self._under_way

    def _order(self, transfer: Transfer) -> None:
        self._under_way[transfer.digest] = transfer
        self._orders.append(transfer)
