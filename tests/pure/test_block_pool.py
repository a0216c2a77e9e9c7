"""BlockPool: examples, and a state machine that knows a simpler model of the same thing."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from engine.core.kv.block_pool import BlockPool
from engine.core.page_table import blocks_for
from tests.integrity import check_pool


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (200, 13)])
def test_blocks_for(num_tokens: int, blocks: int) -> None:
    assert blocks_for(num_tokens, 16) == blocks


def test_a_fresh_pool_hands_out_runs_of_adjacent_blocks() -> None:
    pool = BlockPool(8)
    assert pool.alloc_many(4) == [0, 1, 2, 3]
    other = pool.alloc()
    assert pool.alloc(after=other) == other + 1


def test_cached_blocks_are_taken_last_and_oldest_first() -> None:
    evicted: list[int] = []
    pool = BlockPool(4)
    pool.on_evict(evicted.append)
    blocks = pool.alloc_many(4)
    for block in blocks[:2]:
        pool.index(block)
    for block in (2, 1, 0):
        pool.free(block)
    assert (pool.num_free, pool.num_cached, pool.num_held) == (1, 2, 1)
    assert [pool.alloc(), pool.alloc(), pool.alloc()] == [2, 1, 0]
    assert evicted == [1, 0]


@pytest.mark.parametrize("is_evicted", [True, False])
def test_what_a_content_weighs_the_next_one_does_not(is_evicted: bool) -> None:
    pool = BlockPool(2, 1)
    blocks = pool.alloc_many(2)
    pool.index(blocks[0])
    pool.weigh(blocks[:1], 3)
    pool.pin(blocks[0])
    pool.free(*blocks)
    if not is_evicted:
        pool.forget(blocks[0])
    blocks = pool.alloc_many(2)
    assert not pool.num_pinned
    for block in blocks:
        pool.index(block)
    pool.free(*blocks)
    assert [*pool._cached] == blocks, "as if neither had ever weighed more"


def test_a_content_that_was_passed_by_can_be_pinned() -> None:
    pool = BlockPool(3, 1)
    first, other, last = pool.alloc_many(3)
    for block in (first, other, last):
        pool.index(block)
    pool.pass_by(first, other, last)
    pool.pin(first)
    assert [pool.alloc() for _ in range(3)] == [other, last, first]
    assert not pool.num_pinned


def test_a_block_freed_more_often_than_held_is_our_bug() -> None:
    pool = BlockPool(1)
    block = pool.alloc()
    pool.free(block)
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free(block)


def test_check_integrity_sees_a_leak_and_a_theft() -> None:
    pool = BlockPool(2)
    block = pool.alloc()
    check_pool(pool, [[block]])
    with pytest.raises(AssertionError, match="1 references and 0 holders"):
        check_pool(pool, [])
    with pytest.raises(AssertionError, match="1 references and 2 holders"):
        check_pool(pool, [[block], [block]])


class PoolMachine(RuleBasedStateMachine):
    """Holders come and go; the model is one list of holders and one list of evictable blocks."""

    holds = Bundle("holds")

    @initialize(is_weighed=st.booleans())
    def start(self, is_weighed: bool) -> None:
        self.evicted: list[int] = []
        self.pool = BlockPool(7)
        if is_weighed:
            self.pool.weigh((), 1)
        self.pool.on_evict(self.evicted.append)
        self.held: list[int] = []
        self.indexed: set[int] = set()

    @precondition(lambda self: self.pool.num_available)
    @rule(target=holds, after=st.integers(-1, 8))
    def alloc(self, after: int) -> int:
        had_free = self.pool.num_free > 0
        block = self.pool.alloc(after)
        assert block not in self.held
        assert had_free != (block in self.indexed), "a cached block goes only when no free one is left"
        if not had_free:
            assert self.evicted.pop() == block
            self.indexed.discard(block)
        self.held.append(block)
        return block

    @rule(target=holds, block=holds)
    def fork(self, block: int) -> int:
        if block in self.held or block in self.indexed:
            self.pool.fork(block)
            self.held.append(block)
            return block
        return block

    @rule(block=consumes(holds))
    def free(self, block: int) -> None:
        if block in self.held:
            self.pool.free(block)
            self.held.remove(block)

    @rule(block=holds)
    def index(self, block: int) -> None:
        if block in self.held:
            self.pool.index(block)
            self.indexed.add(block)

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        check_pool(pool, [self.held])
        assert pool.num_free + pool.num_cached + pool.num_held == 7
        assert pool.num_held == len(set(self.held))
        assert pool.num_cached == len(self.indexed - set(self.held))
        assert not self.evicted
        for block in set(self.held):
            assert pool.is_shared(block) == (self.held.count(block) > 1)


TestPoolMachine = PoolMachine.TestCase


def test_a_pool_has_a_bound_on_its_pins_and_the_latest_stay() -> None:
    evicted: list[int] = []
    pool = BlockPool(8, max_pinned=2)
    pool.on_evict(evicted.append)
    blocks = pool.alloc_many(5)
    for block in blocks:
        pool.index(block)
    for block in blocks[:3]:
        pool.pin(block)
        check_pool(pool, [blocks])
    assert pool.num_pinned == 2
    pool.pin(blocks[2])
    assert pool.num_pinned == 2, "one that is pinned already takes the place of none"
    for block in blocks:
        pool.free(block)
    pool.alloc_many(8)
    assert evicted == [blocks[0], blocks[3], blocks[4], blocks[1], blocks[2]], (
        "pinned blocks go last, the first of them first"
    )


def test_a_pool_without_places_for_pins_has_none() -> None:
    pool = BlockPool(2, max_pinned=0)
    [block] = pool.alloc_many(1)
    pool.index(block)
    pool.pin(block)
    assert pool.num_pinned == 0
