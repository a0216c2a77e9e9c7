"""Groups of layers with sliding-window attention, beside the group with full attention. Engine thread.

The layers of a group read the same positions, so they share a page table. All groups draw on one pool: the runner gives
each as many layers as make a block the same bytes, so that a block of one serves any other, and no split of memory has to
be guessed. Each WindowGroup is a group whose layers read the last `window` positions only; its table of a sequence is
`seq.kv.tables[1 + i]`.

    admission        a sequence resumes at the longest boundary that every group can resume from, see `resumable`
    each chunk       it takes the blocks that the chunk writes to, not those of its whole prompt
    each commit      blocks before the window of the next position are freed: no step in flight reads them
    rollback         blocks for what was not computed are freed; they are taken again with the next chunk

Blocks have the same names in all groups; with windows every block is named when it is full. A block that slides out of a
window is evicted before all others, unless prompts may branch there: it is in the window of a prompt's end, or a sequence
has resumed from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from engine.core.kv.prefix_cache import BlockIndex, PrefixCache, name_block
from engine.core.page_table import NO_BLOCK


class WindowGroup(BlockIndex):
    """The blocks of one group: cached under their names, or held by tables."""

    __slots__ = ("_block_size", "_kept", "_resumed", "_window")

    def __init__(self, window: int, cache: PrefixCache) -> None:
        """The pool is that of the layers with full attention."""
        super().__init__(cache.pool.num_blocks, pool=cache.pool)
        self._window, self._block_size = window, cache.block_size
        self._resumed = set[int]()  # blocks that a sequence has resumed from
        self._kept = set[bytes]()  # contents that pinned prefixes are resumed from

    def put(self, name: bytes, block: int) -> None:
        """Make a held block findable; no other block has this content."""
        super().put(name, block)
        if name in self._kept:
            self.pool.pin(block)

    def keep(self, chain: Seq[bytes], index: int, num_tokens: int) -> None:
        """Pin block `index` of a pinned prefix of so many tokens, if the prefix is resumed from it."""
        num_blocks = num_tokens // self._block_size
        if self._first_read(num_blocks * self._block_size) <= index < num_blocks:
            self._kept.add(chain[index + 1])
            self.pin(chain[index + 1])

    def pin(self, name: bytes) -> None:
        """Evict this content last, if it is here and a pinned prefix is resumed from it."""
        if name in self._kept:
            super().pin(name)

    def unpin(self, name: bytes) -> None:
        """Treat this content like any other."""
        self._kept.discard(name)
        super().unpin(name)

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

    def window_at(self, chain: Seq[bytes], num_blocks: int) -> list[int]:
        """Return the table of a sequence that could resume at a boundary; holds nothing."""
        first = self._first_read(num_blocks * self._block_size)
        return [NO_BLOCK] * first + [self.find(name) for name in chain[first + 1 : num_blocks + 1]]

    def resume(self, table: Iterable[int]) -> None:
        """Hold the blocks of a table that `window_at` has returned."""
        hits = [block for block in table if block != NO_BLOCK]
        self.hold(hits)
        self.pool.found(hits)
        self._resumed.update(hits)

    def grow(self, table: list[int], num_blocks: int) -> None:
        """Extend a table to `num_blocks` blocks, if it has fewer."""
        if num_blocks > len(table):
            table += self.pool.alloc_many(num_blocks - len(table), after=table[-1] if table else NO_BLOCK)

    def copy_tail(self, table: list[int]) -> tuple[int, int]:
        """Replace a table's last block, which others hold too; returns the copy to make, (source, destination)."""
        source, table[-1] = table[-1], self.pool.alloc()
        self.pool.free(source)
        return source, table[-1]

    def publish(self, chain: list[bytes], tokens: Seq[int], table: Seq[int], full: Iterable[int]) -> None:
        """Make those of a sequence's full, computed blocks findable that the table still has."""
        for index in full:
            name, block = name_block(chain, tokens, index, self._block_size), table[index]
            if block != NO_BLOCK and self.find(name) < 0 and self.content(block) is None:
                self.put(name, block)
                if self.holdings is not None:
                    self.holdings.compute(chain, tokens, index, self._block_size)

    def slide(self, table: list[int], num_computed: int, num_prompt: int) -> None:
        """Free the blocks that no position from `num_computed` on reads."""
        # Another turn of a conversation, or the same prompt again, resumes at one of the prompt's last two boundaries.
        last = num_prompt // self._block_size
        first_kept = self._first_read((num_prompt - 1) // self._block_size * self._block_size)
        for index in range(self._first_read(num_computed) - 1, -1, -1):
            block = table[index]
            if block == NO_BLOCK:
                break
            table[index] = NO_BLOCK
            if first_kept <= index < last or block in self._resumed:
                self.pool.free(block)
            else:
                self.pool.pass_by(block)

    def cut(self, table: list[int], num_blocks: int) -> list[int]:
        """Return a new table of the first `num_blocks`, and free those behind; a runner compares tables by identity."""
        self.free(table[num_blocks:])
        return table[:num_blocks]

    def hold(self, table: Iterable[int]) -> None:
        """Add a holder to the blocks of a table."""
        for block in table:
            if block != NO_BLOCK:
                self.pool.fork(block)

    def free(self, table: Seq[int]) -> None:
        """Remove a holder of the blocks of a table."""
        self.pool.free(*[block for block in reversed(table) if block != NO_BLOCK])

    def forget(self, block: int) -> None:
        """Make a block's content unfindable."""
        super().forget(block)
        self._resumed.discard(block)

    def _evicted(self, block: int) -> None:
        super()._evicted(block)
        self._resumed.discard(block)
