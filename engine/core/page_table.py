"""The K/V and recurrent state of one sequence: page tables, slots, block names and ticket; the manager writes it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

NEVER = sys.maxsize  # a position that is not reached
NO_BLOCK = -1  # in a window table: the window has passed this block
TO_LOAD = -2  # while a sequence is admitted: a block for this place comes from host memory


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that `num_tokens` positions occupy."""
    return -(-num_tokens // block_size)


def waste(lengths: Iterable[int], block_size: int) -> float:
    """Return the share of their blocks that sequences of these lengths leave empty, 0 to 1."""
    used = held = 0
    for length in lengths:
        used += length
        held += blocks_for(length, block_size) * block_size
    return 1 - used / held if held else 0.0


@dataclass(slots=True, eq=False)
class Ticket:
    """The K/V of a preempted sequence's first `num_tokens` positions, in these host blocks.

    `others` are the host blocks of the other groups: of its window tables, with their gaps, and of its recurrent state.
    If one is lost, nothing of the ticket counts.
    """

    blocks: list[int]
    num_tokens: int
    others: list[list[int]] = field(default_factory=list)

    @property
    def other_blocks(self) -> list[int]:
        """Return the host blocks of the other groups."""
        return [host for table in self.others for host in table if host != NO_BLOCK]

    @property
    def all_blocks(self) -> list[int]:
        """Return the host blocks of all tables."""
        return self.blocks + self.other_blocks


class LeftSlot(NamedTuple):
    """A slot that its sequence has left at a position."""

    position: int
    blocks: list[int]
    ready_at: int  # computed positions from which on it surely has the state before `position`


@dataclass(slots=True, eq=False)
class StateSlots:
    """The slots of a sequence's recurrent state, see kv/snapshots.py; each is a list of blocks."""

    slot: list[int] = field(default_factory=list)  # the state after all planned positions; empty before the first
    is_shared: bool = False  # others may read it: the next chunk writes to another slot
    source: list[int] = field(default_factory=list)  # what the last planned chunk reads: `slot` in a plain decode
    is_moved: bool = False  # no plan has said so yet
    num_behind: int = 0  # accepted drafts that `slot` lacks: the next step takes them in first
    midway: list[int] = field(default_factory=list)  # another slot, which the next chunk writes after ...
    midway_after: int = 0  # ... so many positions
    # Slots that were left, until the step that reads them is committed.
    held: list[LeftSlot] = field(default_factory=list)
    last: bytes = b""  # the name of the last snapshot behind the prompt
    continued: bytes = b""  # that of the snapshot which no sequence but this one has resumed from

    @property
    def tables(self) -> list[list[int]]:
        """Return the blocks of all slots that the sequence holds."""
        return [self.slot, *[left.blocks for left in self.held]] if self.slot else []

    @property
    def due(self) -> int:
        """Return the computed positions at which a slot that was left is no longer read."""
        return self.held[0].position + 1 if self.held else NEVER


@dataclass(slots=True, eq=False)
class SequenceKV:
    """`tables[g][i]` is the block of positions i * block_size .. (i + 1) * block_size - 1 in group g of the layers."""

    block_size: int
    chain: list[bytes]  # names, see prefix_cache.py; an empty root keeps the sequence out of the cache
    is_cacheable: bool = True
    tables: tuple[list[int], ...] = ()  # none while it holds no blocks
    state: StateSlots = field(default_factory=StateSlots)
    # The boundary up to which the first group's blocks were found, but no state; later one where another prompt leaves.
    branch: int = 0
    is_lost: bool = False  # what it has in the other groups was to be written by a step that was rolled back
    num_owed: int = 0  # blocks that its other groups may still need before its known tokens are computed
    # The cached blocks that it can begin with, and the host blocks that follow, as they were at these versions of the pool
    # and of host memory, for so many tokens.
    matched: tuple[list[int], list[int]] = ([], [])
    matched_at: tuple[int, int, int] = (-1, 0, 0)
    slots: list[int] = field(default_factory=list)  # runner rows: one, or one a choice until the prompt is computed
    num_published: int = 0  # blocks that the prefix cache was shown
    # Computed positions at which the next block is due: a prompt's as they are computed, an answer's at its end, unless
    # lower tiers or snapshots need its names.
    next_publish: int = NEVER
    writable_until: int = 0  # positions below have a block that is this sequence's alone
    shares_tail: bool = False  # the last block may have other holders: it is copied before the first write
    is_arriving: bool = False  # a step in flight loads what it was admitted with
    num_pinned: int = 0  # of the first positions
    num_from: dict[str, int] = field(default_factory=dict)  # positions first admitted with, by the tier below the pool
    num_awaited: int = 0  # blocks of all groups that are being fetched from a store for it ...
    num_coming: int = 0  # ... how many of its first blocks it can begin with then ...
    awaits_until_s: float = 0.0  # ... and when it is admitted without them
    num_fetches: int = 0  # times that they were fetched again, because host memory lost them while it waited ...
    is_fetched_again: bool = False  # ... as now: no other sequence is admitted before it
    ticket: Ticket | None = None  # from being preempted until it resumes
    num_saved: int = 0  # positions that its ticket had when it was preempted last

    def __post_init__(self) -> None:
        self.is_cacheable = bool(self.chain[0])
        self.clear()

    def clear(self) -> None:
        """Forget the blocks; the caller frees them."""
        self.tables, self.slots, self.state = (), [], StateSlots()
        self.num_published = self.writable_until = 0
        self.next_publish = self.block_size if self.is_cacheable else NEVER
        self.shares_tail = self.is_lost = False
        self.matched_at = (-1, 0, 0)

    @property
    def blocks(self) -> list[int]:
        """Return the table of the first group, which keeps every position."""
        return self.tables[0] if self.tables else []

    @property
    def held(self) -> list[list[int]]:
        """Return the blocks of all tables, with their gaps, and of all slots of the state."""
        return [*self.tables, *self.state.tables]

    @property
    def capacity(self) -> int:
        """Return how many positions the table can address."""
        return len(self.blocks) * self.block_size

    def useful_ticket(self, num_cached: int) -> Ticket | None:
        """Return the ticket if it has more positions than are cached."""
        return self.ticket if self.ticket is not None and self.ticket.num_tokens > num_cached else None

    def follow(self, other: SequenceKV) -> None:
        """Map the blocks of another answer to the same prompt. The caller counts the references."""
        self.tables = tuple(map(list, other.tables))
        self.state = StateSlots(other.state.slot)
        self.chain = other.chain.copy()
        self.num_published = other.num_published
        self.next_publish = other.next_publish
