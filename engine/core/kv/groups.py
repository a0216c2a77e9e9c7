"""Groups of layers with sliding-window attention, beside the group with full attention. Engine thread.

The layers of a group read the same positions, so they share a page table. All groups draw on one pool: the runner gives
each as many layers as make a block the same bytes, so that a block of one serves any other, and no split of memory has to
be guessed. A WindowGroup's table of a sequence is `seq.kv.tables[number]`. Layers with recurrent state are in
snapshots.py. KVCacheManager calls the methods of both for each group in turn:

    admission        a sequence resumes at the longest boundary that every group can resume from: `resumable`, `begin`,
                     `resume`, and `fill` for what host memory has of it, as of its ticket; `owed` says what it may still
                     need
    each chunk       `cover`: it takes the blocks that the chunk writes to, not those of its whole prompt
    each block       `slide`: blocks before the window of the next position are freed, as no step in flight reads them;
                     then `extend`
    each commit      of a prompt, `publish`, then `slide`
    rollback         `roll_back`: blocks for what was not computed are freed; they are taken again with the next chunk

A block has the name that it would have in the first group, and the number of its group behind it. A block that slides out
of a window is evicted before all others, unless prompts may branch there: it is in the window of a prompt's end, of the
place where the prompt leaves an earlier one, or of one of the boundaries of a long prompt that are `EVERY` blocks apart,
or a sequence has resumed from it. The blocks of an answer are named at its end, with the window that it has then, unless
tiers or snapshots need their names before; so a block that slides out while the answer decodes has no name, and is free.
Tiers get what prompts may branch from. A content that the first group loses goes to the tiers with it, and is forgotten
by all others (`drop`): no prompt reaches it in the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from engine.core.config import SchedulerConfig
from engine.core.in_flight import InFlightStep
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.prefix_cache import DIGEST_BYTES, BlockIndex, Listener, PrefixCache, in_group, name_block
from engine.core.page_table import NO_BLOCK, TO_LOAD, blocks_for
from engine.core.sequence import Sequence

EVERY = 256  # blocks of a long prompt between two boundaries that are kept, at least ...
SPACING = 4  # ... and times the blocks that one takes in all groups: a prompt's take a quarter of its K/V at most


class Group(BlockIndex):
    """What is cached of one group beside the first, and where sequences can resume in it.

    A content is one block, or several that are worth nothing apart. A boundary is reached through the contents of the
    blocks that the last `window` - 1 positions before it are in. Contents are named by the block at whose end they stand.
    """

    def __init__(
        self, number: int, config: SchedulerConfig, cache: PrefixCache, listener: Listener | None = None
    ) -> None:
        """The pool is that of the layers with full attention; `listener` takes what prompts may branch from."""
        super().__init__(config.num_blocks, pool=cache.pool)
        kind = config.groups[number]
        self.number, self._window, self._block_size = number, kind.window, config.block_size
        self._suffixes = [in_group(b"", number, part) for part in range(kind.num_parts)]
        self._config, self._listener = config, listener
        sizes = (blocks_for(kind.window - 1, config.block_size) * kind.num_parts for kind in config.groups[1:])
        self._every = max(EVERY, SPACING * sum(sizes)) * config.block_size
        self._branches = set[int]()  # findable blocks that prompts may resume from
        self._kept = set[bytes]()  # contents that pinned prefixes are resumed from

    def names(self, name: bytes) -> list[bytes]:
        """Return the names of a content's blocks, here and below the pool."""
        return [name + suffix for suffix in self._suffixes]

    def blocks_of(self, name: bytes) -> list[int]:
        """Return the blocks of a content; none if it is not here."""
        if name + self._suffixes[0] not in self._block_of:
            return []
        return [self._block_of[name + suffix] for suffix in self._suffixes]

    def has(self, name: bytes) -> bool:
        """Return whether a content is here."""
        return name + self._suffixes[0] in self._block_of

    def register(self, chain: list[bytes], tokens: Seq[int], index: int, blocks: Seq[int]) -> bool:
        """Make held blocks findable as the content at block `index` of some tokens; False if others are, or they are."""
        name = name_block(chain, tokens, index, self._block_size)
        if self.has(name) or self.content(blocks[0]) is not None:
            return False
        for suffix, block in zip(self._suffixes, blocks, strict=True):
            self.put(name + suffix, block)
            if name in self._kept:
                self.pool.pin(block)
        self.holdings.compute(chain, tokens, index, self._block_size, self.number)
        return True

    def keep(self, chain: Seq[bytes], index: int, num_tokens: int) -> None:
        """Pin the content at block `index` of a pinned prefix of so many tokens, if the prefix is resumed from it."""
        if index in self.window_at(num_tokens // self._block_size):
            self._kept.add(chain[index + 1])
            self.pin(chain[index + 1])

    def pin(self, name: bytes) -> None:
        """Evict this content last, if it is here and a pinned prefix is resumed from it."""
        for block in self.blocks_of(name) if name in self._kept else ():
            self.pool.pin(block)

    def unpin(self, name: bytes) -> None:
        self._kept.discard(name)
        for block in self.blocks_of(name):
            self.pool.unpin(block)

    def drop(self, name: bytes) -> None:
        """Forget a content that no prompt reaches any more; the tiers get it if prompts may branch there."""
        for suffix in self._suffixes:
            block = self.find(name + suffix)
            self._leave(block)
            self.forget(block)

    def forget(self, block: int) -> None:
        super().forget(block)
        self._branches.discard(block)

    def _evicted(self, block: int) -> None:
        name = self.content(block)
        if name is not None:
            self._leave(block)
            super()._evicted(block)
            self._branches.discard(block)
            if len(self._suffixes) > 1:
                self.drop(name[:DIGEST_BYTES])

    def branch(self, blocks: Iterable[int]) -> None:
        """Note that prompts may resume from those of these blocks that are findable."""
        for block in blocks:
            name = self.content(block)
            if name is not None and block not in self._branches:
                self._branches.add(block)
                if self._listener is not None:
                    self._listener.appeared(name, block)

    def _leave(self, block: int) -> None:
        name = self.content(block)
        if self._listener is not None and name is not None and block in self._branches:
            self._listener.leaves(name, block)

    def _first_read(self, position: int) -> int:
        """Return the index of the first block that computing a position reads."""
        return max(position - self._window + 1, 0) // self._block_size

    def window_at(self, num_blocks: int) -> range:
        """Return the blocks at which the contents stand that computing from a boundary on reads."""
        return range(self._first_read(num_blocks * self._block_size), num_blocks)

    def resumable(self, chain: Seq[bytes], num_blocks: int, is_below: Callable[[bytes], bool]) -> int:
        """Return the last block boundary, `num_blocks` at most, whose contents are cached here or below the pool."""
        index = num_blocks - 1
        while index >= self._first_read(num_blocks * self._block_size):
            name = chain[index + 1]
            if not (self.has(name) or all(map(is_below, self.names(name)))):
                num_blocks = index
            index -= 1
        return num_blocks

    def size_at(self, num_blocks: int) -> int:
        """Return how many blocks what is read at a boundary takes."""
        return len(self.window_at(num_blocks)) * len(self._suffixes)

    def lacking(self, chain: Seq[bytes], num_blocks: int) -> list[bytes]:
        """Return the names of what is read at a boundary and is not here."""
        lacking = [index for index in self.window_at(num_blocks) if not self.has(chain[index + 1])]
        return [name for index in lacking for name in self.names(chain[index + 1])]


class WindowGroup(Group):
    """A group whose layers attend to the last positions only, and its page tables."""

    def begin(self, seq: Sequence, num_blocks: int, saved: Seq[int] | None) -> int:
        """Give a sequence the window at a boundary, or that of its ticket; returns the blocks that it takes of the pool.

        It holds none of them yet.
        """
        if saved is not None:
            table = [NO_BLOCK if host == NO_BLOCK else TO_LOAD for host in saved]
        else:
            window, chain = self.window_at(num_blocks), seq.kv.chain
            hits = [(self.blocks_of(chain[index + 1]) or [TO_LOAD])[0] for index in window]
            table = [NO_BLOCK] * window.start + hits
        seq.kv.tables = (*seq.kv.tables, table)
        return sum([block == TO_LOAD or (block >= 0 and not self.pool.is_held(block)) for block in table])

    def resume(self, seq: Sequence) -> None:
        """Hold the blocks that `begin` has found."""
        hits = [block for block in self._table(seq) if block >= 0]
        for block in hits:
            self.pool.fork(block)
        self.branch(hits)

    def fill(self, seq: Sequence) -> list[int]:
        """Return new blocks for what `begin` has not found."""
        return fill(self._table(seq), self.pool)

    def owed(self, seq: Sequence) -> int:
        """Return how many blocks a sequence may still need here while its known tokens are computed."""
        table, num_tokens = self._table(seq), len(seq.tokens)
        num_left = max(blocks_for(num_tokens, self._block_size), len(seq.kv.tables[0])) - len(table)
        if num_left <= 0:
            return 0
        most = self._config.window_blocks(self._window, num_tokens, seq.request.longest_atomic)
        held = table[-most:]  # and what the window has passed, which comes first
        return min(most - len(held) + held.count(NO_BLOCK), num_left)

    def cover(self, seq: Sequence, stop: int, step: InFlightStep) -> None:
        """Take the blocks that the next chunk of a prompt needs."""
        table = self._table(seq)
        num_before, is_end = len(table), stop == len(seq.tokens)
        num_new = (len(seq.kv.blocks) if is_end else blocks_for(stop, self._block_size)) - num_before
        if num_new > 0:
            table += self.pool.alloc_many(num_new, after=table[-1] if table else NO_BLOCK)
            slot, group = seq.slot, self.number
            step.entries += tuple([(slot, group, at, table[at]) for at in range(num_before, len(table))])

    def extend(self, seq: Sequence, step: InFlightStep, *, is_copied: bool) -> None:
        """Make the next position writable, in a copy of the last block if others hold that."""
        table = self._table(seq)
        if is_copied:
            source, table[-1] = table[-1], self.pool.alloc()
            self.pool.free(source)
            step.copies += ((source, table[-1]),)
        elif len(table) < len(seq.kv.blocks):  # by one: the tables of a sequence that decodes are equally long
            table.append(self.pool.alloc(after=table[-1] if table else NO_BLOCK))
        else:
            return
        step.entries += ((seq.slot, self.number, len(table) - 1, table[-1]),)

    def publish(self, seq: Sequence, num_known: int) -> None:
        """Make those of the full blocks of known, computed positions findable that the table still has."""
        table, chain = self._table(seq), seq.kv.chain
        for index in range(seq.kv.num_published, num_known // self._block_size):
            if table[index] == NO_BLOCK:
                name_block(chain, seq.tokens, index, self._block_size)
            else:
                self.register(chain, seq.tokens, index, (table[index],))

    def slide(self, seq: Sequence) -> None:
        """Free the blocks that no position to compute reads."""
        table, num_passed = self._table(seq), self._first_read(seq.num_computed)
        if not num_passed or table[num_passed - 1] == NO_BLOCK:
            return
        for index in range(num_passed - 1, -1, -1):
            block = table[index]
            if block == NO_BLOCK:
                break
            table[index] = NO_BLOCK
            if self._may_branch(seq, index):
                self.branch((block,))
            if block in self._branches:
                self.pool.free(block)
            else:
                self.pool.pass_by(block)

    def _may_branch(self, seq: Sequence, index: int) -> bool:
        """Return whether a block is in the window of a boundary at which prompts may leave this one."""
        size, every = self._block_size, self._every // self._block_size
        last = seq.num_prompt // size
        if index >= last:
            return False
        # Another turn of a conversation, or the same prompt again, resumes at one of the prompt's last two boundaries.
        turn_end, next_kept = (seq.request.turn_end or seq.num_prompt - 1) // size, (index // every + 1) * every
        ends = (turn_end, last, seq.kv.branch // size, next_kept)
        return any(end <= last and index in self.window_at(end) for end in ends)

    def roll_back(self, seq: Sequence, start: int) -> None:
        """Free the blocks behind those of `start` positions."""
        table, num_blocks = self._table(seq), blocks_for(start, self._block_size)
        self.pool.free(*[block for block in reversed(table[num_blocks:]) if block != NO_BLOCK])
        del table[num_blocks:]

    def free(self, seq: Sequence) -> None:
        """Remove a holder of the blocks of a sequence."""
        blocks = [block for block in reversed(self._table(seq)) if block != NO_BLOCK]
        self.branch(blocks)
        self.pool.free(*blocks)

    def _table(self, seq: Sequence) -> list[int]:
        return seq.kv.tables[self.number]


def fill(table: list[int], pool: BlockPool) -> list[int]:
    """Replace the places of a table that are to be loaded by new blocks; returns these."""
    places = [index for index, block in enumerate(table) if block == TO_LOAD]
    for index in places:
        table[index] = pool.alloc()
    return [table[index] for index in places]


def last_boundary(groups: Seq[Group], chain: Seq[bytes], num_blocks: int, is_below: Callable[[bytes], bool]) -> int:
    """Return the last block boundary, `num_blocks` at most, from which all groups can resume."""
    while True:  # a boundary that one group lowers may be none for the others
        lowered = num_blocks
        for group in groups:
            lowered = group.resumable(chain, lowered, is_below)
        if lowered == num_blocks:
            return num_blocks
        num_blocks = lowered
