"""Checks that the books of core balance: every block held by what names it, every index and queue in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from engine.core.in_flight import InFlightStep
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.host_tier import HostTier
from engine.core.kv.manager import KVCacheManager
from engine.core.kv.pins import Pins
from engine.core.kv.prefix_cache import BlockIndex
from engine.core.kv.tiers import Tiers
from engine.core.page_table import NO_BLOCK
from engine.core.queues.fair import FairQueue
from engine.core.queues.keyed import KeyedQueue, by_order
from engine.core.scheduling.running import RunningQueue, _place
from engine.core.scheduling.scheduler import Scheduler
from engine.core.sequence import Sequence as Living
from engine.core.stats import TransferKind

Holders = Iterable[Iterable[int]]


def check_scheduler(scheduler: Scheduler) -> None:
    """Nothing is held without a holder, and no sequence is in the wrong place."""
    holders = scheduler._queue.holders(scheduler._in_flight)
    check_running(scheduler._queue)
    num_leaving = sum(seq.is_leaving for seq in holders)
    assert scheduler._output.num_leaving == num_leaving, "leaving sequences are miscounted"
    assert scheduler._in_flight or not num_leaving, "a sequence waits for a step that is not in flight"
    check_kv(scheduler.kv, holders, scheduler._in_flight)
    if not (holders or scheduler._in_flight):
        assert not scheduler.kv.num_leaked, "the books balance, and the engine counts a leak"


def check_running(queue: RunningQueue) -> None:
    """The running and the waiting sequences are in order."""
    assert queue.running == sorted(queue.running, key=_place), "the running sequences are out of order"
    check_queue(queue.foreground)
    check_queue(queue.background)
    if queue.may_yield:
        held = Counter([seq.account for seq in queue.running])
        assert all(account.num_running == num for account, num in held.items()), "a tenant's holding is miscounted"


def check_queue(queue: KeyedQueue) -> None:
    """Each line is in order."""
    if not isinstance(queue, FairQueue):
        assert queue._waiting == sorted(queue._waiting, key=by_order), "the queue is out of order"
        return
    for account, lane in queue._lanes.items():
        assert lane, "a lane is empty"
        assert lane == sorted(lane, key=by_order), "a lane is out of order"
        assert all(seq.account is account for seq in lane), "a lane is mixed"


def check_kv(kv: KVCacheManager, living: Collection[Living], in_flight: Iterable[InFlightStep]) -> None:
    """`living` and plans in flight hold exactly what is held."""
    slots = sorted(kv._slots + [slot for seq in living for slot in seq.kv.slots])
    assert slots == list(range(kv._max_num_seqs)), "a runner slot is lost or taken twice"
    imported = [each.held for each in kv.imports._open]
    tables = [table for seq in living for table in seq.kv.held]
    held = [[block for block in table if block != NO_BLOCK] for table in tables]
    check_index(kv._cache, [*held, *imported], kv._others)
    assert kv.pool.num_owed == sum(seq.kv.num_owed for seq in living), "what sequences are owed is miscounted"
    check_tiers(kv.tiers, [step.loaded_hosts for step in in_flight])
    check_pins(kv.pins)


def check_tiers(tiers: Tiers, holders: Sequence[Sequence[int]]) -> None:
    """`holders`, tickets and transfers hold what is held of host blocks and slots, and no copy is due in vain."""
    transfers, host = list(tiers._under_way.values()), tiers.host
    hosts = [transfer.host_block for transfer in transfers] + [host for _, _, host in tiers._staged]
    loading = {transfer.name for transfer in transfers if transfer.kind is TransferKind.LOAD}
    assert tiers._parked.keys() <= loading, "a sequence waits for a block that is not being loaded"
    check_host(host, [*holders, hosts])
    for tier, store in tiers.stores.items():
        check_index(store, [[transfer.slot for transfer in transfers if transfer.tier == tier]])


def check_host(host: HostTier, holders: Holders) -> None:
    """Tickets and `holders` hold what is held, and no copy is due in vain."""
    check_index(host, [*holders, *(ticket.all_blocks for ticket in host._tickets)])
    wanted = (host.pool.is_held(block) or host.content(block) is not None for block in host._due)
    assert all(wanted), "a copy is due to a block that is free"


def check_pins(pins: Pins) -> None:
    """The bound holds, and every pin has its end in the heap."""
    assert len(pins.until) <= pins._max_pinned, "more is pinned than may be"
    ends = {digest for until, _, digest in pins._heap if pins.until.get(digest) == until}
    assert len(ends) == len(pins.until), "a pin has no end"


def check_index(index: BlockIndex, holders: Holders | None = None, others: Sequence[BlockIndex] = ()) -> None:
    """`holders`, if given, hold what is held; both directions of the index and of others on its pool agree."""
    pool, indexes, findable = index.pool, [index, *others], index.pool.findable
    check_pool(pool, ([block] * pool._refs[block] for block in range(pool.num_blocks)) if holders is None else holders)
    for each in indexes:
        assert len(each._block_of) == len(each._name_of), "a content is nowhere"
    for block in range(pool.num_blocks):
        owners = [each for each in indexes if _is_owner(each, block)]
        assert len(owners) == findable[block], f"{len(owners)} indexes find block {block}"


def _is_owner(index: BlockIndex, block: int) -> bool:
    """Return whether a block can be found in an index; its name leads to it."""
    name = index._name_of.get(block)
    assert name is None or index._block_of.get(name) == block, f"block {block} is not where its content is"
    return name is not None


def check_pool(pool: BlockPool, holders: Holders) -> None:
    """Reference counts equal what `holders`, all page tables, hold, and each block is in one state."""
    counts = Counter[int]()
    for held in holders:
        counts.update(held)
    for block, refs in enumerate(pool._refs):
        assert refs == counts[block], f"block {block} has {refs} references and {counts[block]} holders"
        is_spared, is_pinned = block in pool._spared, block in pool._pinned
        is_cached = (block in pool._cached) + (block in pool._passed)
        places = (refs > 0) + (block in pool._free) + is_cached + is_spared
        assert places == 1, f"block {block} is in {places} of the states free, cached and held"
        assert not (is_cached if is_pinned else is_spared), "a pin is in the wrong order"
        assert pool._indexed[block] or not (is_cached or is_pinned), "the prefix cache does not know a block"
    assert len(pool._pinned) <= pool.max_pinned
