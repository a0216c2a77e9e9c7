"""Finds KV blocks that already hold the beginning of a prompt.

A full block is named by a chain of digests: digest(parent, its tokens), where the root of a chain is the request's
salt and adapter. Two blocks share a name only if all tokens before them agree too, so a hit needs no further comparison. The
digest is cryptographic (BLAKE2b-256) because a collision would show one user's context to another, and by content
because names must outlive the process once blocks move to slower tiers. Eviction is least recently used: the pool
keeps unheld blocks in the order they were let go, tails before heads. Owned by the scheduler, engine thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from engine.core.block_pool import BlockPool


def chain_root(salt: str, adapter: bytes = b"") -> bytes:
    """The digest that stands before a prompt's first block; `adapter` is the digest of one that changes all K/V."""
    text = salt.encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=32, person=b"quire.prefix", key=adapter).digest()


def chain_next(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a full block that follows `parent`."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=32).digest()


class PrefixCache:
    """An index over the pool's blocks, digest to block and back."""

    __slots__ = ("_block_of", "_digest_of", "block_size", "pool")

    def __init__(self, num_blocks: int, block_size: int, eviction: str = "lru") -> None:
        self.pool = BlockPool(num_blocks, self._forget, eviction)
        self.block_size = block_size
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def match(self, chain: list[bytes], tokens: Sequence[int], max_tokens: int) -> list[int]:
        """The longest run of cached blocks that starts `tokens` and covers at most `max_tokens` of them.

        `chain` begins with the root; it is extended in place, as far as the search goes, for later calls.
        """
        size = self.block_size
        blocks: list[int] = []
        for index in range(max_tokens // size):
            if len(chain) == index + 1:
                chain.append(chain_next(chain[index], tokens[index * size : (index + 1) * size]))
            block = self._block_of.get(chain[index + 1])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def register(self, chain: list[bytes], tokens: Sequence[int], blocks: Sequence[int], first: int, stop: int) -> None:
        """Make the full, computed blocks first .. stop - 1 of a sequence findable."""
        size = self.block_size
        for index in range(first, stop):
            if len(chain) == index + 1:
                chain.append(chain_next(chain[index], tokens[index * size : (index + 1) * size]))
            digest, block = chain[index + 1], blocks[index]
            # Two sequences may have computed the same block side by side; the first one stays the findable one.
            if digest not in self._block_of and block not in self._digest_of:
                self._block_of[digest] = block
                self._digest_of[block] = digest
                self.pool.index(block)

    def _forget(self, block: int) -> None:
        del self._block_of[self._digest_of.pop(block)]

    def check_integrity(self) -> None:
        """Raise AssertionError unless both directions of the index agree."""
        assert {block: digest for digest, block in self._block_of.items()} == self._digest_of
