"""What becomes of a sequence that has to give way: its K/V goes to host memory and comes back, or is computed anew.

Host blocks are those of tiers.py, from where cached ones make way; a HostPool of the runtime keeps their content. A
sequence's life there:

    save       the next plan copies its blocks out; the pool's are free at once, since that plan copies before it writes
    restore    a plan brings back what the prefix cache has not; other sequences' slices of that plan do not wait for it
    discard    it ended, or the copy never came about

A host block that a plan in flight names is given back at its commit, never before. Owned by the scheduler, engine
thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from engine.core.config import SchedulerConfig
from engine.core.in_flight import InFlightStep
from engine.core.kv.page_table import blocks_for
from engine.core.kv.swap_belief import SwapBelief
from engine.core.kv.tiers import Tiers
from engine.core.sequence import Sequence, Status


class SwapSpace:
    """Host blocks, saved to and restored from sequence by sequence."""

    def __init__(self, config: SchedulerConfig, tiers: Tiers, costs: SwapBelief) -> None:
        self._block_size = config.block_size
        self._costs = costs
        self._tiers = tiers
        self.pool = tiers.host.pool

    def save(self, seq: Sequence) -> bool:
        """Have what is computed of a preempted sequence copied before its blocks are written again.

        False where that does not pay or there is no room. To be called before its blocks are released.
        """
        num_blocks = blocks_for(seq.num_computed, self._block_size)
        has_room = self.pool.num_available >= num_blocks
        if not has_room or seq.needs_every_position or not self._costs.pays_to_save(seq.num_computed):
            return False
        seq.kv.host_blocks = self.pool.alloc_many(num_blocks)
        seq.kv.num_saved = seq.num_computed
        self._tiers.due.update(zip(seq.kv.host_blocks, seq.kv.blocks, strict=False))  # the table may reach further
        seq.move(Status.SWAPPED)
        return True

    def restore(self, seq: Sequence) -> tuple[list[tuple[int, int]], list[tuple[int, int]], list[int], int]:
        """Bring a sequence's blocks back, but for the first, which the prefix cache still had when it was admitted.

        Returns the fields of a Grant.
        """
        num_found, loads = seq.num_computed, list[tuple[int, int]]()
        if seq.kv.num_saved > num_found:
            first = num_found // self._block_size
            loads += zip(seq.kv.host_blocks[first:], seq.kv.blocks[first:], strict=False)
            seq.num_computed = seq.num_planned = seq.kv.num_saved
        host_blocks, seq.kv.host_blocks, seq.kv.num_saved = seq.kv.host_blocks, [], 0
        return [], loads, host_blocks, num_found

    def discard(self, seq: Sequence, in_flight: deque[InFlightStep]) -> None:
        """Forget a sequence's copy: now, or when the last plan that may name it is committed."""
        blocks, seq.kv.host_blocks, seq.kv.num_saved = seq.kv.host_blocks, [], 0
        for block in blocks:
            self._tiers.due.pop(block, None)
        if in_flight:
            in_flight[-1].host_blocks += blocks
        else:
            self._free(blocks)

    def settle(self, step: InFlightStep) -> None:
        """A plan was committed, or taken back: nothing reads or writes its host blocks any more."""
        self._free(step.host_blocks)

    def check_integrity(self, living: Iterable[Sequence], in_flight: Iterable[InFlightStep]) -> None:
        """Raise AssertionError unless sequences and plans in flight hold exactly what is held."""
        sequences = [seq for seq in living if seq.status is Status.SWAPPED]
        tables = [seq.kv.host_blocks for seq in sequences]
        self._tiers.check_integrity([*tables, *(step.host_blocks for step in in_flight)])
        for seq in sequences:
            assert len(seq.kv.host_blocks) == blocks_for(seq.kv.num_saved, self._block_size), "a copy is not whole"
        saved = {block for table in tables for block in table}
        wanted = (host in saved or self._tiers.host.content(host) is not None for host in self._tiers.due)
        assert all(wanted), "a copy is due that nobody wants"

    def _free(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.pool.free(block)


def never_saved(in_flight: Collection[InFlightStep], waiting: Iterable[Sequence]) -> list[Sequence]:
    """Of those that wait, whoever was to be copied out by plans that are taken back: the pool's blocks have new owners."""
    lost = {host for step in in_flight for _, host in step.swap_out}
    return [seq for seq in waiting if not lost.isdisjoint(seq.kv.host_blocks)] if lost else []
