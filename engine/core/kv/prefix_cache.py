"""Finds KV blocks that already hold the beginning of a prompt.

A full block is named by a chain of digests: digest(parent, its tokens), where the root of a chain is the request's
owner, salt and adapter. Two blocks share a name only if all tokens before them agree too, so a hit needs no further
comparison. The digest is cryptographic (BLAKE2b-256), because a collision would show one user's context to another. It
depends on content alone, because names must outlive the process once blocks move to slower tiers. Naming a block costs
about 2 us, and few requests continue an answer, so an answer's blocks are named when a request looks for them. If a prompt
leaves a known chain inside a block, the block can be copied for the tokens that agree. eviction.py chooses the block to
evict. Owned by the scheduler, engine thread.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Container, Sequence
from functools import cache
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple, Protocol

from engine.core.kv.block_index import BlockIndex


def chain_root(salt: str, adapter: bytes = b"", owner: str = "") -> bytes:
    """Return the digest before a prompt's first block; `adapter` is the digest of an adapter."""
    text = salt.encode("utf-8", "surrogatepass")
    whose = blake2b(owner.encode(), digest_size=16).digest() if owner else b""
    return blake2b(text, digest_size=32, person=b"quire.prefix", key=adapter, salt=whose).digest()


def first_names(
    root: bytes, public_root: bytes, tokens: Sequence[int], num_public: int, block_size: int
) -> list[bytes]:
    """Return the beginning of a chain: its root, or the names of blocks whose tokens are public.

    Public blocks are shared, except the last one: it and all blocks after it have names of the request's root. So a
    block with tokens that are not public is never found from a public one.
    """
    if not num_public:
        return [root]
    chain = [public_root]
    for index in range(num_public):
        name_block(chain, tokens, index, block_size)
    chain[-1] = blake2b(chain[-1], digest_size=32, key=root).digest()
    return chain


def chain_next(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the digest of a full block that follows `parent`."""
    return _chain(parent, _pack(tokens))


def _chain(parent: bytes, content: bytes) -> bytes:
    return blake2b(parent + content, digest_size=32).digest()


_TOKEN_BYTES = 8
_make = tuple.__new__  # a NamedTuple's constructor is a Python function and costs as much as packing a block


def _pack(tokens: Sequence[int]) -> bytes:
    return _packer(len(tokens))(*tokens)


@cache
def _packer(count: int) -> Callable[..., bytes]:
    """Return a Struct, twice as fast as array("q", tokens).tobytes(); there are few counts."""
    return Struct(f"{count}q").pack


def _num_common(one: bytes, other: bytes) -> int:
    """Return the number of first tokens that two packed runs have in common."""
    length = min(len(one), len(other))
    differing = int.from_bytes(one[:length], "little") ^ int.from_bytes(other[:length], "little")
    return ((differing & -differing).bit_length() - 1) // (8 * _TOKEN_BYTES) if differing else length // _TOKEN_BYTES


def name_block(chain: list[bytes], tokens: Sequence[int], index: int, block_size: int) -> bytes:
    """Return the digest of full block `index`; `chain` begins with the root and is extended."""
    if len(chain) == index + 1:
        chain.append(chain_next(chain[index], tokens[index * block_size : (index + 1) * block_size]))
    return chain[index + 1]


class Listener(Protocol):
    """Receives which blocks become findable and which are evicted."""

    def appeared(self, digest: bytes, block: int) -> None:
        """A block can be found from now on."""
        ...

    def leaves(self, digest: bytes, block: int) -> None:
        """A block is evicted; it has its content until the next plan."""
        ...


class _Entry(NamedTuple):
    """A findable block."""

    digest: bytes
    parent: bytes
    tokens: bytes  # packed


class _Run(NamedTuple):
    """Findable blocks without names."""

    parent: bytes  # the digest before them
    tokens: Sequence[int]
    blocks: list[int]  # none of them was found, so the last ones are evicted first


class PrefixCache(BlockIndex):
    """An index over the pool's blocks: by digest, and by parent and tokens."""

    __slots__ = ("_entry_of", "_followers", "_listener", "_run_of", "_unnamed", "block_size")

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        eviction: str = "lru",
        listener: Listener | None = None,
        pins: Container[bytes] = (),
        max_pinned: int = 0,
    ) -> None:
        super().__init__(num_blocks, self._forget, eviction, pins, max_pinned)
        self._listener = listener
        self.block_size = block_size
        self._entry_of: dict[int, _Entry] = {}
        self._followers: dict[bytes, list[tuple[bytes, int]]] = {}  # parent -> (tokens, block), sorted
        self._unnamed: dict[bytes, list[_Run]] = {}  # by the digest before them
        self._run_of: dict[int, _Run] = {}  # by block

    def match(self, chain: list[bytes], tokens: Sequence[int], max_tokens: int) -> list[int]:
        """Return the longest run of cached blocks that starts `tokens`, up to `max_tokens`.

        `chain` begins with the root and is extended in place, as far as the search goes, for later calls.
        """
        size = self.block_size
        blocks: list[int] = []
        for index in range(max_tokens // size):
            if chain[index] in self._unnamed:
                self._name(chain[index])
            block = self._block_of.get(name_block(chain, tokens, index, size))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def register(self, chain: list[bytes], tokens: Sequence[int], blocks: Sequence[int], first: int, stop: int) -> None:
        """Make the full, computed blocks first .. stop - 1 of a sequence findable."""
        for block in blocks[first:stop]:
            if block in self._run_of:  # it had several holders, one of which has left
                self._name(self._run_of[block].parent)
        size = self.block_size
        for index in range(first, stop):
            content, parent, block = _pack(tokens[index * size : (index + 1) * size]), chain[index], blocks[index]
            if len(chain) == index + 1:
                chain.append(_chain(parent, content))
            digest = chain[index + 1]
            # Two sequences may have computed the same block concurrently; the first one stays findable.
            if digest not in self._block_of and block not in self._entry_of:
                self._entry_of[block] = _make(_Entry, (digest, parent, content))
                insort(self._followers.setdefault(parent, []), (content, block))
                self._index(digest, block)
                if self._listener is not None:
                    self._listener.appeared(digest, block)

    def leave(self, chain: list[bytes], tokens: Sequence[int], blocks: Sequence[int], first: int, stop: int) -> None:
        """As `register`, for a sequence that releases all its blocks; they are named on demand."""
        parent, left = chain[first], list(blocks[first:stop])
        own = tokens[first * self.block_size : stop * self.block_size]
        is_held = not (self._run_of.keys().isdisjoint(left) and self._entry_of.keys().isdisjoint(left))
        # Existing names are kept: they may differ from those that would be made (see `first_names`).
        is_named = len(chain) > first + 1
        if is_held or is_named or self._listener is not None or self._is_followed_by(parent, own):
            self.register(chain, tokens, blocks, first, stop)
            return
        runs = self._unnamed.setdefault(parent, [])
        if any(self._begins_with(run, own) for run in runs):
            return  # another sequence has left the same
        run = _Run(parent, own, left)
        runs.append(run)
        self._run_of |= dict.fromkeys(left, run)
        for block in left:
            self.pool.index(block)

    def _is_followed_by(self, parent: bytes, tokens: Sequence[int]) -> bool:
        """Return whether a named block after `parent` holds the first of these tokens."""
        followers, content = self._followers.get(parent, []), _pack(tokens[: self.block_size])
        at = bisect_left(followers, (content, -1))
        return at < len(followers) and followers[at][0] == content

    def _begins_with(self, run: _Run, tokens: Sequence[int]) -> bool:
        is_long = len(run.blocks) * self.block_size >= len(tokens)
        return is_long and run.tokens[0] == tokens[0] and run.tokens[: len(tokens)] == tokens

    def _name(self, parent: bytes) -> None:
        """Name the blocks of the runs after `parent`; duplicates become unfindable."""
        for run in self._unnamed.pop(parent):
            for block in run.blocks:
                del self._run_of[block]
            self.register([parent], run.tokens, run.blocks, 0, len(run.blocks))
            for block in run.blocks:
                if block not in self._entry_of:
                    self.pool.forget(block)

    def _cut(self, block: int) -> None:
        """Remove a block of a run; the blocks after it cannot be found either."""
        run = self._run_of[block]
        at = -1 if run.blocks[-1] == block else run.blocks.index(block)
        gone = run.blocks[at:]
        del run.blocks[at:]
        for each in gone:
            del self._run_of[each]
        for each in gone[1:]:
            self.pool.forget(each)
        if not run.blocks:
            rest = [each for each in self._unnamed.pop(run.parent) if each is not run]
            if rest:
                self._unnamed[run.parent] = rest

    def match_start(self, parent: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the known block after `parent` that begins with most of `tokens`, and how many.

        (-1, 0) if there is none. In sorted order the best candidates are adjacent, so two are compared.
        """
        if parent in self._unnamed:
            self._name(parent)
        followers = self._followers.get(parent)
        if not followers:
            return -1, 0
        wanted = _pack(tokens)
        at = bisect_left(followers, (wanted, -1))
        near = followers[max(at - 1, 0) : at + 1]
        common, block = max([(_num_common(wanted, content), block) for content, block in near])
        return (block, common) if common else (-1, 0)

    def _forget(self, block: int) -> None:
        if block in self._run_of:
            self._cut(block)
            return
        entry = self._entry_of.pop(block)
        del self._block_of[entry.digest]
        followers = self._followers[entry.parent]
        del followers[bisect_left(followers, (entry.tokens, block))]
        if not followers:
            del self._followers[entry.parent]
        if self._listener is not None:
            self._listener.leaves(entry.digest, block)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all directions of the index agree."""
        assert {digest: block for block, (digest, _, _) in self._entry_of.items()} == self._block_of
        followers = {(parent, *each) for parent, siblings in self._followers.items() for each in siblings}
        assert followers == {(parent, content, block) for block, (_, parent, content) in self._entry_of.items()}
        assert all(siblings and siblings == sorted(siblings) for siblings in self._followers.values())
        runs = [run for each in self._unnamed.values() for run in each]
        assert {block: run for run in runs for block in run.blocks} == self._run_of
        assert all(run.blocks for run in runs)
        assert all(each and {run.parent for run in each} == {parent} for parent, each in self._unnamed.items())
        assert self._run_of.keys().isdisjoint(self._entry_of), "a block has a name and none"
