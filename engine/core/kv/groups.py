"""Groups of layers with sliding-window attention, beside the group with full attention. Engine thread.

The layers of a group read the same positions, so they share a pool and a page table. Each WindowPool is a group whose
layers read the last `window` positions only; its table of a sequence is `seq.kv.window_tables[i]`.

    admission        a sequence resumes at the longest boundary that every group can resume from, see `resumable`
    each chunk       it takes the blocks that the chunk writes to, not those of its whole prompt
    each commit      blocks before the window of the next position are freed: no step in flight reads them
    rollback         blocks for what was not computed are freed; they are taken again with the next chunk

SchedulerConfig demands a pool that has the windows and chunks of all runner rows. So no allocation here can fail, and the
group with full attention alone decides who is admitted and preempted. Blocks have the same names in all groups; with
windows every block is named when it is full. Host blocks, stores and pins are refused, and K/V of another engine is
recomputed in these groups. The real runner reads the group with full attention only.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from engine.core.config import WindowGroup
from engine.core.kv.prefix_cache import BlockIndex, name_block

NO_BLOCK = -1  # in a table: the window has passed this block


class WindowPool(BlockIndex):
    """The blocks of one group: free, cached under their names, or held by tables."""

    __slots__ = ("_block_size", "_copies", "_window")

    def __init__(self, group: WindowGroup, block_size: int, eviction: str) -> None:
        super().__init__(group.num_blocks, eviction)
        self._window, self._block_size = group.window, block_size
        self._copies: list[tuple[int, int]] = []  # for the plan that is being made

    def _first_read(self, position: int) -> int:
        """Return the index of the first block that computing a position reads."""
        return max(position - self._window + 1, 0) // self._block_size

    def resumable(self, chain: Seq[bytes], num_blocks: int) -> int:
        """Return the last block boundary, `num_blocks` at most, whose window is cached."""
        index = num_blocks - 1
        while index >= self._first_read(num_blocks * self._block_size):
            if self.find(chain[index + 1]) < 0:
                num_blocks = index
            index -= 1
        return num_blocks

    def resume(self, chain: Seq[bytes], num_blocks: int) -> list[int]:
        """Return the table of a sequence that resumes at a boundary; holds the cached blocks of its window."""
        first = self._first_read(num_blocks * self._block_size)
        hits = [self.find(name) for name in chain[first + 1 : num_blocks + 1]]
        self.hold(hits)
        self.pool.found(hits)
        return [NO_BLOCK] * first + hits

    def grow(self, table: list[int], num_blocks: int) -> None:
        """Extend a table to `num_blocks` blocks, if it has fewer."""
        if num_blocks > len(table):
            table += self.pool.alloc_many(num_blocks - len(table), after=table[-1] if table else NO_BLOCK)

    def copy_tail(self, table: list[int]) -> None:
        """Replace a table's last block, which others hold too, by a copy."""
        source, table[-1] = table[-1], self.pool.alloc()
        self.pool.free(source)
        self._copies.append((source, table[-1]))

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the copies that the plan makes, (source, destination)."""
        copies, self._copies = self._copies, []
        return copies

    def publish(self, chain: list[bytes], tokens: Seq[int], table: Seq[int], full: Iterable[int]) -> None:
        """Make those of a sequence's full, computed blocks findable that the table still has."""
        for index in full:
            name, block = name_block(chain, tokens, index, self._block_size), table[index]
            if block != NO_BLOCK and self.find(name) < 0 and self.content(block) is None:
                self.put(name, block)
                if self.holdings is not None:
                    self.holdings.compute(chain, tokens, index, self._block_size)

    def slide(self, table: list[int], num_computed: int) -> None:
        """Free the blocks that no position from `num_computed` on reads."""
        passed: list[int] = []
        for index in range(self._first_read(num_computed) - 1, -1, -1):
            if table[index] == NO_BLOCK:
                break
            passed.append(table[index])
            table[index] = NO_BLOCK
        self.pool.free(*passed)

    def cut(self, table: list[int], num_blocks: int) -> None:
        """Free the blocks behind the first `num_blocks`."""
        self.free(table[num_blocks:])
        del table[num_blocks:]

    def hold(self, table: Iterable[int]) -> None:
        """Add a holder to the blocks of a table."""
        for block in table:
            if block != NO_BLOCK:
                self.pool.fork(block)

    def free(self, table: Seq[int]) -> None:
        """Remove a holder of the blocks of a table."""
        self.pool.free(*[block for block in reversed(table) if block != NO_BLOCK])
