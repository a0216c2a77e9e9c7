"""The K/V state of one sequence: its page table, block names and ticket; the manager writes it."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from typing import NamedTuple

NEVER = sys.maxsize


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that `num_tokens` positions occupy."""
    return -(-num_tokens // block_size)


class Layout(NamedTuple):
    """What two engines have to agree on to exchange blocks."""

    fingerprint: str  # of the weights, the types and the layout of a block
    block_size: int  # tokens
    block_bytes: int


class Ticket:
    """The K/V of a preempted sequence's first `num_tokens` positions, in these host blocks; see host_tier.py."""

    __slots__ = ("blocks", "num_tokens")

    def __init__(self, blocks: list[int], num_tokens: int) -> None:
        self.blocks, self.num_tokens = blocks, num_tokens


class SequenceKV:
    """`blocks[i]` is the physical block of positions i * block_size .. (i + 1) * block_size - 1."""

    __slots__ = (
        "awaits_until_s",
        "block_size",
        "blocks",
        "chain",
        "is_arriving",
        "is_cacheable",
        "next_publish",
        "num_awaited",
        "num_from",
        "num_pinned",
        "num_published",
        "num_saved",
        "shares_tail",
        "slots",
        "ticket",
        "window_tables",
        "writable_until",
    )

    def __init__(self, block_size: int, names: Seq[bytes]) -> None:
        """`names` are the first of the chain, see prefix_cache.py; an empty root keeps the sequence out of the cache."""
        self.block_size = block_size
        self.chain = list(names)
        self.is_cacheable = bool(names[0])
        self.slots: list[int] = []  # runner rows: one, or one a choice until the prompt of n > 1 is computed
        self.is_arriving = False  # a step in flight copies or loads what it was admitted with
        self.num_pinned = 0  # of the first positions
        self.num_from: dict[str, int] = {}  # positions that it was first admitted with, by the tier below the pool
        self.num_awaited = 0  # blocks that are being fetched from a disk for it ...
        self.awaits_until_s = 0.0  # ... and when it is admitted without them
        self.ticket: Ticket | None = None  # from being preempted until it resumes
        self.num_saved = 0  # positions that its ticket had when it was preempted last
        self.clear()

    def clear(self) -> None:
        """Forget the blocks; the caller frees them."""
        self.blocks: list[int] = []
        self.window_tables: Seq[list[int]] = ()
        self.slots = []
        self.num_published = 0  # blocks that the prefix cache was shown
        # Computed positions at which the next block is due: a prompt's as they are computed, an answer's at its end. With
        # windows each block is, because those before the window are freed with it.
        self.next_publish = self.block_size if self.is_cacheable else NEVER
        self.writable_until = 0  # positions below have a block that is this sequence's alone
        self.shares_tail = False  # the last block may have other holders: it is copied before the first write

    @property
    def capacity(self) -> int:
        """Positions that the table can address. The next token after these needs a new block."""
        return len(self.blocks) * self.block_size

    def follow(self, other: SequenceKV) -> None:
        """Map the blocks of another answer to the same prompt. The caller counts the references."""
        self.blocks = list(other.blocks)
        self.window_tables = [list(table) for table in other.window_tables]
        self.chain = list(other.chain)
        self.num_published = other.num_published
        self.next_publish = other.next_publish


class PrefixImport:
    """Blocks for K/V that another engine computed; none is in a page table.

    The first `num_found` of `blocks` were cached already.
    """

    __slots__ = ("blocks", "chain", "num_found", "tokens")

    def __init__(self, chain: list[bytes], tokens: Seq[int], blocks: list[int], num_found: int) -> None:
        self.chain, self.tokens, self.blocks, self.num_found = chain, tokens, blocks, num_found

    @property
    def to_fill(self) -> list[int]:
        """The blocks that the K/V is to be written to."""
        return self.blocks[self.num_found :]
