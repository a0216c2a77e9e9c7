"""Host memory behind the pool: cached blocks, and tickets of preempted sequences. Engine thread.

Full blocks of a ticket keep their names, so a block that is already in host memory is not copied, and any sequence may
find it. Blocks without a name (of a sequence that is not cacheable, or not full) are private to the ticket. A ticket
holds its blocks until its sequence resumes or ends, so only cached blocks are evicted for others. Copies ride in plans:
out before anything is written to the pool, in after the copy-on-write copies. If a step is rolled back its copies never
happened, and tickets end before the first block that was lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable

from engine.core.in_flight import InFlightStep
from engine.core.kv.prefix_cache import BlockIndex, name_block
from engine.core.page_table import NO_BLOCK, Ticket, blocks_for
from engine.core.sequence import Sequence
from engine.core.step import Pairs


class HostTier(BlockIndex):
    """Host blocks, and the copies to them that plans have to make."""

    def __init__(self, num_blocks: int, block_size: int, pins: Container[bytes] = (), max_pinned: int = 0) -> None:
        super().__init__(num_blocks, pins, max_pinned)
        self._block_size = block_size
        self._due: dict[int, int] = {}  # host block -> the pool's, for the next plan to copy out
        self._num_copies: Counter[int] = Counter()  # to each host block, by plans in flight
        self._tickets: dict[Ticket, None] = {}
        self.origins: dict[int, str] = {}  # the stores of blocks that were loaded and not found yet
        self.is_given_up = False  # copies fail here

    def offload(self, digest: bytes, block: int) -> None:
        """Schedule the copy of a cached block that the pool evicts, unless host memory has it or has no room."""
        if self.find(digest) < 0 and self.pool.num_expendable and not self.is_given_up:
            host = self.pool.alloc()
            self._due[host] = block
            self._put_copy(digest, host)
            self.pool.free(host)

    def save(self, seq: Sequence) -> Ticket | None:
        """Schedule the copy of a preempted sequence's K/V; None if that does not pay.

        Recomputing one block takes no longer than its copy. For more blocks, copying takes a hundredth of the time of
        computing on a CPU, and a quarter or less on a GPU.
        """
        kv, num_behind = seq.kv, seq.kv.state.num_behind
        num_saved = seq.num_computed - num_behind  # the state is that before the drafts which were accepted last
        num_blocks = blocks_for(num_saved, kv.block_size)
        others = [table[:num_blocks] for table in kv.tables[1:]] + ([kv.state.slot] if kv.state.slot else [])
        num_needed = num_blocks + sum(len(table) - table.count(NO_BLOCK) for table in others)
        has_room = self.pool.num_available >= num_needed and not self.is_given_up
        is_lost = kv.is_lost or (num_behind > 0 and len(kv.tables) > 1)  # windows may have passed
        if num_blocks < 2 or not has_room or is_lost or seq.needs_every_position:
            return None
        num_named = min(num_saved, len(seq.tokens)) // kv.block_size if kv.is_cacheable else 0
        blocks: list[int] = []
        for index in range(num_blocks):
            digest = name_block(kv.chain, seq.tokens, index, kv.block_size) if index < num_named else None
            host = -1 if digest is None else self.find(digest)
            if host >= 0:
                self.pool.fork(host)
            else:
                host = self.pool.alloc()
                self._due[host] = kv.blocks[index]
                if digest is not None:
                    self._put_copy(digest, host)
            blocks.append(host)
        ticket = Ticket(blocks, num_saved, [[self._copy(block) for block in table] for table in others])
        self._tickets[ticket] = None
        return ticket

    def _copy(self, block: int) -> int:
        """Schedule the copy of a block of another group, which has no name here; returns the host block."""
        if block == NO_BLOCK:
            return NO_BLOCK
        host = self.pool.alloc()
        self._due[host] = block
        return host

    def discard(self, ticket: Ticket) -> None:
        """Release a ticket's blocks; those with names stay as cached blocks."""
        del self._tickets[ticket]
        self.release(ticket.all_blocks)

    def release(self, hosts: Iterable[int]) -> None:
        """Drop one holder of each of these host blocks."""
        for host in hosts:
            self.pool.free(host)
            if self.content(host) is None and not self.pool.is_held(host):
                self._due.pop(host, None)

    def take_due(self) -> Pairs:
        """Return the copies that the next plan makes, as (block of the pool, host block)."""
        if not self._due:
            return ()
        due = tuple([(block, host) for host, block in self._due.items()])
        self._num_copies.update(self._due.keys())
        self._due.clear()
        return due

    def settle(self, step: InFlightStep, *, is_done: bool) -> list[tuple[bytes, int]]:
        """Take in the end of a step; returns the contents that arrived, with their blocks."""
        self.release(step.loaded_hosts)
        arrived: list[tuple[bytes, int]] = []
        for _, host in step.swap_out:
            self._num_copies[host] -= 1
            if self._num_copies[host]:
                continue
            del self._num_copies[host]
            if host in self._due:
                continue
            digest = self.content(host)
            if not is_done:
                self._lose(host)
            elif digest is not None:
                arrived.append((digest, host))
                self.holdings.arrive(digest)
        return arrived

    def _put_copy(self, digest: bytes, host: int) -> None:
        """Make a content findable whose copy is due."""
        self.put(digest, host)
        self.holdings.expect(digest)

    def has_content(self, digest: bytes, host: int) -> bool:
        """Return whether a host block has this content, and its copy is not still due or in flight."""
        return self.find(digest) == host and host not in self._num_copies and host not in self._due

    def overwritten(self, blocks: Iterable[int]) -> None:
        """Drop the copies of blocks of the pool that are written before the next plan copies them out."""
        written = set(blocks)
        for host in [host for host, block in self._due.items() if block in written]:
            if self._due.pop(host, None) is not None:  # else it went with a ticket's tail
                self._lose(host)

    def give_up(self) -> None:
        """Stop copying blocks. Tickets, and copies that are still due, are lost."""
        self.is_given_up = True
        self.pool.version += 1  # nothing is found here any more
        for ticket in self._tickets:
            self._cut(ticket, 0)
        for host in self._due:
            self.forget(host)
        self._due.clear()

    def _lose(self, host: int) -> None:
        """Forget a host block whose copy never happened; tickets end before it."""
        self.forget(host)
        for ticket in self._tickets:
            if host in ticket.all_blocks:
                self._cut(ticket, 0 if ticket.others else ticket.blocks.index(host))

    def _cut(self, ticket: Ticket, num_blocks: int) -> None:
        """Release all but the first blocks of a ticket; of one with other groups, all blocks."""
        ticket.num_tokens = min(ticket.num_tokens, num_blocks * self._block_size)
        lost = ticket.all_blocks[num_blocks:]
        del ticket.blocks[num_blocks:]
        ticket.others.clear()
        self.release(lost)

    def forget(self, block: int) -> None:
        super().forget(block)
        self.origins.pop(block, None)

    def _evicted(self, block: int) -> None:
        super()._evicted(block)
        self._due.pop(block, None)
        self.origins.pop(block, None)
