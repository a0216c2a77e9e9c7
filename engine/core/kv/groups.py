"""Groups of layers with sliding-window attention, beside the group with full attention. Engine thread.

The layers of a group read the same positions, so they share a page table. All groups draw on one pool: the runner gives
each as many layers as make a block the same bytes, so that a block of one serves any other, and no split of memory has to
be guessed. Each WindowGroup is a group whose layers read the last `window` positions only; its table of a sequence is
`seq.kv.tables[1 + index]`. Layers with recurrent state are in snapshots.py. KVCacheManager
calls the methods of both for each group in turn:

    admission        a sequence resumes at the longest boundary that every group can resume from: `resumable`, `begin`,
                     `resume`, or `load` for what host memory has of it; `owed` says what it may still need
    each chunk       `cover`: it takes the blocks that the chunk writes to, not those of its whole prompt
    each block       `extend`; of a recurrent state both are `advance`
    each commit      `publish`, then `slide`: blocks before the window of the next position are freed, as no step in
                     flight reads them
    rollback         `roll_back`: blocks for what was not computed are freed; they are taken again with the next chunk

Blocks have the same names in all groups; with several groups every block is named when it is full. A block that slides
out of a window is evicted before all others, unless prompts may branch there: it is in the window of a prompt's end, or a
sequence has resumed from it. A content that the first group loses is forgotten by all others (`drop`): no prompt reaches it.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from engine.core.config import SchedulerConfig
from engine.core.in_flight import InFlightStep
from engine.core.kv.prefix_cache import BlockIndex, PrefixCache, name_block
from engine.core.page_table import NO_BLOCK, blocks_for
from engine.core.sequence import Sequence


class WindowGroup(BlockIndex):
    """The blocks of one group: cached under their names, or held by tables."""

    __slots__ = ("_block_size", "_config", "_index", "_kept", "_resumed", "_window")

    def __init__(self, index: int, config: SchedulerConfig, cache: PrefixCache) -> None:
        """The pool is that of the layers with full attention."""
        super().__init__(config.num_blocks, pool=cache.pool)
        self._index, self._config = index, config
        self._window, self._block_size = config.windows[index], config.block_size
        self._resumed = set[int]()  # blocks that a sequence has resumed from
        self._kept = set[bytes]()  # contents that pinned prefixes are resumed from

    # -- the index -----------------------------------------------------------------------------------------------------

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

    def forget(self, block: int) -> None:
        """Make a block's content unfindable."""
        super().forget(block)
        self._resumed.discard(block)

    def _evicted(self, block: int) -> None:
        super()._evicted(block)
        self._resumed.discard(block)

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

    # -- a sequence's table --------------------------------------------------------------------------------------------

    def begin(self, seq: Sequence, num_blocks: int, *, loads: bool) -> int:
        """Give a sequence the window at a boundary, without holding it; returns the blocks that nothing holds yet.

        The table is empty if the sequence `loads` it instead.
        """
        first = self._first_read(num_blocks * self._block_size)
        hits = [] if loads else [self.find(name) for name in seq.kv.chain[first + 1 : num_blocks + 1]]
        seq.kv.tables = (*seq.kv.tables, [NO_BLOCK] * first + hits if hits else [])
        return sum([not self.pool.is_held(block) for block in hits])

    def resume(self, seq: Sequence) -> None:
        """Hold the blocks that `begin` has found."""
        hits = [block for block in self._table(seq) if block != NO_BLOCK]
        self.hold(seq)
        self.pool.found(hits)
        self._resumed.update(hits)

    def load(self, seq: Sequence, hosts: Iterable[int]) -> None:
        """Allocate blocks for those of a ticket."""
        self._table(seq).extend([host if host == NO_BLOCK else self.pool.alloc() for host in hosts])

    def owed(self, seq: Sequence) -> int:
        """Return how many blocks a sequence may still need here while its known tokens are computed."""
        num_tokens, table = len(seq.tokens), self._table(seq)
        if len(table) >= max(blocks_for(num_tokens, self._block_size), len(seq.kv.blocks)):
            return 0
        return max(self._config.window_blocks(self._window, num_tokens) - len(table) + table.count(NO_BLOCK), 0)

    def cover(self, seq: Sequence, stop: int, step: InFlightStep) -> None:
        """Take the blocks that the next chunk of a prompt needs."""
        is_end = stop == len(seq.tokens)
        self._grow(seq, len(seq.kv.blocks) if is_end else blocks_for(stop, self._block_size), step)

    def extend(self, seq: Sequence, copied: int, step: InFlightStep) -> None:
        """Make the next position writable; `copied` is the shared block that the first group copied, or NO_BLOCK."""
        table = self._table(seq)
        if copied != NO_BLOCK:  # the same sequences hold it here
            source, table[-1] = table[-1], self.pool.alloc()
            self.pool.free(source)
            step.copies.append((source, table[-1]))
            step.entries.append((seq.slot, self._index + 1, len(table) - 1, table[-1]))
        self._grow(seq, len(seq.kv.blocks), step)

    def _grow(self, seq: Sequence, num_blocks: int, step: InFlightStep) -> None:
        table = self._table(seq)
        num_before = len(table)
        if num_blocks > num_before:
            table += self.pool.alloc_many(num_blocks - num_before, after=table[-1] if table else NO_BLOCK)
            slot, group = seq.slot, self._index + 1
            step.entries += [(slot, group, at, table[at]) for at in range(num_before, num_blocks)]

    def publish(self, seq: Sequence, full: int) -> None:
        """Make those of a sequence's full, computed blocks findable that the table still has."""
        chain, tokens, table = seq.kv.chain, seq.tokens, self._table(seq)
        for index in range(seq.kv.num_published, full):
            name, block = name_block(chain, tokens, index, self._block_size), table[index]
            if block != NO_BLOCK and self.find(name) < 0 and self.content(block) is None:
                self.put(name, block)
                if self.holdings is not None:
                    self.holdings.compute(chain, tokens, index, self._block_size)

    def slide(self, seq: Sequence) -> None:
        """Free the blocks that no position to compute reads."""
        # Another turn of a conversation, or the same prompt again, resumes at one of the prompt's last two boundaries.
        table, last = self._table(seq), seq.num_prompt // self._block_size
        first_kept = self._first_read((seq.num_prompt - 1) // self._block_size * self._block_size)
        for index in range(self._first_read(seq.num_computed) - 1, -1, -1):
            block = table[index]
            if block == NO_BLOCK:
                break
            table[index] = NO_BLOCK
            if first_kept <= index < last or block in self._resumed:
                self.pool.free(block)
            else:
                self.pool.pass_by(block)

    def roll_back(self, seq: Sequence, start: int) -> None:
        """Free the blocks behind those of `start` positions."""
        table, num_blocks = self._table(seq), blocks_for(start, self._block_size)
        self.pool.free(*[block for block in reversed(table[num_blocks:]) if block != NO_BLOCK])
        del table[num_blocks:]

    def hold(self, seq: Sequence) -> None:
        """Add a holder to the blocks of a sequence."""
        for block in self._table(seq):
            if block != NO_BLOCK:
                self.pool.fork(block)

    def free(self, seq: Sequence) -> None:
        """Remove a holder of the blocks of a sequence."""
        self.pool.free(*[block for block in reversed(self._table(seq)) if block != NO_BLOCK])

    def _table(self, seq: Sequence) -> list[int]:
        return seq.kv.tables[self._index + 1]
