"""Names K/V blocks by their contents, and finds those that hold the beginning of a prompt.

A full block is named by a chain of digests: digest(parent, its tokens), where the root of a chain is the request's
owner, salt and adapter. Two blocks share a name only if all tokens before them agree too, so a hit needs no further
comparison. The digest is cryptographic (BLAKE2b-256), because a collision would show one user's context to another. It
depends on content alone, because names outlive the process when blocks move to slower tiers. Engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from functools import cache
from hashlib import blake2b
from struct import Struct
from typing import Protocol

from engine.core.config import SchedulerConfig
from engine.core.kv.block_pool import BlockPool
from engine.core.page_table import NO_BLOCK
from engine.core.spans import Chain
from engine.core.types import Request

DIGEST_BYTES = 32  # of a block's name
_SUFFIX = Struct("<BH")  # of a name: the group, and the part


def chain_root(salt: str, adapter: bytes = b"", owner: str = "") -> bytes:
    """Return the digest before a prompt's first block; `adapter` is the digest of an adapter."""
    text = salt.encode("utf-8", "surrogatepass")
    whose = blake2b(owner.encode(), digest_size=16).digest() if owner else b""
    return blake2b(text, digest_size=DIGEST_BYTES, person=b"quire.prefix", key=adapter, salt=whose).digest()


def request_names(request: Request, config: SchedulerConfig) -> list[bytes]:
    """Return how a request's chain of names begins; the root is empty if nothing is cached."""
    if not config.enable_prefix_caching:
        return [b""]
    digest = b"" if request.params.adapter is None else request.params.adapter.digest
    root = [chain_root(request.cache_salt, digest, request.cache_owner)]
    return Chain(root, request.spans, config.block_size) if request.spans else root


def chain_next(parent: bytes, tokens: Sequence[int], part: bytes = b"") -> bytes:
    """Return the digest of a full block that follows `parent`; `part` is of the spans that it covers."""
    return blake2b(parent + _packer(len(tokens))(*tokens) + part, digest_size=DIGEST_BYTES).digest()


@cache
def _packer(count: int) -> Callable[..., bytes]:
    """Return a Struct, twice as fast as array("q", tokens).tobytes(); there are few counts."""
    return Struct(f"{count}q").pack


def name_block(chain: list[bytes], tokens: Sequence[int], index: int, block_size: int) -> bytes:
    """Return the digest of full block `index`; `chain` begins with the root and is extended so far."""
    while (at := len(chain) - 1) <= index:
        part = chain.parts.get(at, b"") if isinstance(chain, Chain) else b""
        chain.append(chain_next(chain[at], tokens[at * block_size : (at + 1) * block_size], part))
    return chain[index + 1]


def in_group(name: bytes, group: int, part: int = 0) -> bytes:
    """Return the name of a block of a group of layers, which may be one of several parts of a content."""
    return name + _SUFFIX.pack(group, part).rstrip(b"\0")


class Holdings:
    """Hears what an index gains and loses; engine/outbound/contents.py makes KV events of it, this one nothing."""

    def compute(self, chain: Sequence[bytes], tokens: Sequence[int], index: int, size: int, group: int = 0) -> None:
        """Note that full block `index` of a chain is here, computed, or what a group has for it."""

    def expect(self, name: bytes) -> None:
        """Note that a content is being copied here."""

    def arrive(self, name: bytes) -> None:
        """Note that a content is here, copied."""

    def lose(self, name: bytes) -> None:
        """Note that a content is here no longer, or will not arrive."""


_UNHEARD = Holdings()


class BlockIndex:
    """Finds the blocks of a pool by name; contents in `pins` are evicted last. Indexes may share a pool."""

    def __init__(
        self,
        num_blocks: int,
        pins: Container[bytes] = (),
        max_pinned: int = 0,
        pool: BlockPool | None = None,
    ) -> None:
        """With `pool` the blocks are those of another index; only a block's owner finds it."""
        self.pool = BlockPool(num_blocks, max_pinned) if pool is None else pool
        self.pool.on_evict(self._evicted)
        self._pins = pins
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self.holdings = _UNHEARD

    def find(self, name: bytes) -> int:
        """Return the block with this content; -1 if there is none."""
        return self._block_of.get(name, -1)

    @property
    def num_findable(self) -> int:
        """Return how many blocks prompts find here, held or cached."""
        return len(self._name_of)

    def content(self, block: int) -> bytes | None:
        """Return the name that a block can be found by; None if it cannot be found."""
        return self._name_of.get(block)

    def put(self, name: bytes, block: int) -> None:
        """Make a held block findable; no other block has this content."""
        self._block_of[name] = block
        self._name_of[block] = name
        self.pool.index(block)
        if self.pool.max_pinned and name in self._pins:
            self.pool.pin(block)

    def drop(self, name: bytes) -> None:
        """Forget a content, if it is here."""
        self.forget(self.find(name))

    def forget(self, block: int) -> None:
        """Make a block's content unfindable."""
        name = self._name_of.pop(block, None)
        if name is not None:
            del self._block_of[name]
            self.pool.forget(block)
            self.holdings.lose(name)

    def pin(self, name: bytes) -> None:
        """Evict this content last, if it is here."""
        if name in self._block_of:
            self.pool.pin(self._block_of[name])

    def unpin(self, name: bytes) -> None:
        """Treat this content like any other."""
        if name in self._block_of:
            self.pool.unpin(self._block_of[name])

    def pass_by(self, name: bytes) -> None:
        """Evict this content before all others, if it is here and nothing holds it."""
        if (block := self.find(name)) >= 0:
            self.pool.fork(block)
            self.pool.pass_by(block)

    def _evicted(self, block: int) -> None:
        name = self._name_of.pop(block, None)
        if name is None:
            return  # it is another index's
        del self._block_of[name]
        self.holdings.lose(name)


class Listener(Protocol):
    """The tiers below the pool: they hear which blocks become findable, and which are evicted."""

    def appeared(self, name: bytes, block: int) -> None: ...

    def leaves(self, name: bytes, block: int) -> None: ...  # the block keeps its content until the next plan

    def pass_by(self, name: bytes) -> None: ...  # few prompts will find it again


class PrefixCache(BlockIndex):
    """An index over the pool's blocks, by the tokens that lead to them."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        listener: Listener | None = None,
        pins: Container[bytes] = (),
        max_pinned: int = 0,
    ) -> None:
        super().__init__(num_blocks, pins, max_pinned)
        self._listener = listener
        self.block_size = block_size
        self.dependents: Sequence[BlockIndex] = ()

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to blocks of a sequence."""
        for block in blocks:
            self.pool.fork(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a holder of blocks of a sequence, the last ones first."""
        self.pool.free(*reversed(blocks))

    def take(self, count: int, *, after: int) -> list[int]:
        """Return new blocks of a sequence."""
        return self.pool.alloc_many(count, after=after)

    def match(self, chain: list[bytes], tokens: Sequence[int], max_tokens: int) -> list[int]:
        """Return the longest run of cached blocks that starts `tokens`, up to `max_tokens`.

        `chain` begins with the root and is extended in place for later calls.
        """
        size = self.block_size
        blocks: list[int] = []
        for index in range(max_tokens // size):
            name = name_block(chain, tokens, index, size)
            block = self._block_of.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def register(self, chain: list[bytes], tokens: Sequence[int], blocks: Sequence[int], first: int, stop: int) -> None:
        """Make the full, computed blocks first .. stop - 1 of a sequence findable."""
        for index in range(first, stop):
            name, block = name_block(chain, tokens, index, self.block_size), blocks[index]
            # Two sequences may have computed the same block concurrently; the first one stays findable.
            if name not in self._block_of and block not in self._name_of:
                self.put(name, block)
                if self._listener is not None:
                    self._listener.appeared(name, block)
                self.holdings.compute(chain, tokens, index, self.block_size)

    def _evicted(self, block: int) -> None:
        name = self._name_of.get(block)
        if name is not None:
            if self._listener is not None:
                self._listener.leaves(name, block)
            for dependent in self.dependents:
                dependent.drop(name)
        super()._evicted(block)


class Unkept(PrefixCache):
    """The first group of a model without full attention: it has any block, and none takes memory."""

    def hold(self, blocks: Iterable[int]) -> None:
        """Do nothing."""

    def release(self, blocks: Sequence[int]) -> None:
        """Do nothing."""

    def take(self, count: int, *, after: int) -> list[int]:  # noqa: ARG002 - PrefixCache's parameters
        """Return places in a table."""
        return [NO_BLOCK] * count

    def match(self, chain: list[bytes], tokens: Sequence[int], max_tokens: int) -> list[int]:
        """Return all places: whether a prompt can be resumed there is for the other groups to say."""
        num_blocks = max_tokens // self.block_size
        self.register(chain, tokens, (), 0, num_blocks)
        return [NO_BLOCK] * num_blocks

    def register(self, chain: list[bytes], tokens: Sequence[int], blocks: Sequence[int], first: int, stop: int) -> None:  # noqa: ARG002 - PrefixCache's parameters
        """Name blocks."""
        if stop > first:
            name_block(chain, tokens, stop - 1, self.block_size)
